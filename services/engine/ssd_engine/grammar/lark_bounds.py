"""What in a context-free grammar would take too much work, told before it is compiled."""

import re

from ssd_engine.grammar.json_schemas.bounds import MAX_PATTERNS_TOGETHER
from ssd_engine.grammar.lark_schemas import bare_rules

# Rules and brackets of one grammar: the library calls itself for each that lies in another one.
MAX_RULE_LEVELS = 10_000
# A rule of GBNF is looked at once for each other one, until it is known which are terminals.
MAX_GBNF_RULES = 500
# Names of terminals, with what they stand for in place of them: a million take two seconds.
MAX_TERMINAL_NAMES = 1_000_000
_TERMINAL = re.compile(r"^[ \t]*(_?[A-Z][_A-Z0-9]*)[^:\n]*:", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*[?!_]*[a-zA-Z][^:\n]*:", re.MULTILINE)
_NAME = re.compile(r"\b_?[A-Z][_A-Z0-9]*\b")


def lark_excess(source: str) -> str:
    """What there is too much of; nothing otherwise."""
    rules = bare_rules(source)
    if (together := rules.count("&")) > MAX_PATTERNS_TOGETHER:
        return f"{together} times &, at most {MAX_PATTERNS_TOGETHER}"
    if (levels := sum(map(rules.count, "\n([{"))) > MAX_RULE_LEVELS:
        return f"{levels} rules and brackets, at most {MAX_RULE_LEVELS}"
    if (names := _terminal_names(rules)) > MAX_TERMINAL_NAMES:
        return f"its terminals stand for {names} names of each other, at most {MAX_TERMINAL_NAMES}"
    return ""


def gbnf_excess(source: str) -> str:
    if (rules := source.count("::=")) > MAX_GBNF_RULES:
        return f"{rules} rules, at most {MAX_GBNF_RULES}"
    return ""


def _terminal_names(rules: str) -> int:
    inner = {name: _NAME.findall(body) for name, body in _terminals(rules)}
    sizes: dict[str, int] = {}
    waiting = list(inner)
    while waiting:
        name = waiting[-1]
        unknown = [each for each in inner[name] if each in inner and each not in sizes]
        if unknown and name not in sizes:
            sizes[name] = 0  # one that stands for itself is refused by the library
            waiting += unknown
            continue
        sizes[name] = min(
            MAX_TERMINAL_NAMES, 1 + sum(1 + sizes.get(each, 0) for each in inner[name])
        )
        waiting.pop()
    return sum(sizes.values())


def _terminals(rules: str) -> list[tuple[str, str]]:
    heads = list(_RULE.finditer(rules))
    ends = [head.start() for head in heads[1:]] + [len(rules)]
    return [
        (found[1], rules[head.end() : end])
        for head, end in zip(heads, ends, strict=True)
        if (found := _TERMINAL.match(rules, head.start()))
    ]
