"""Grammars are compiled, or refused by the place that is wrong; work is bounded."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import MOST_IDLE, MOST_IDLE_SECONDS, GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.sources import MAX_CHOICES, MAX_REGEX_BYTES
from ssd_engine.grammar.spec import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.suite.scale import share

END = 1


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the text, and nothing less, is one of the grammar."""
    follower = compiler.follow(grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return follower.num_allowed([], [*tokens, END]) == len(tokens) + 1


NUMBERS = 'root ::= digit | digit ", " root\ndigit ::= [0-9]'
LARK = 'start: "(" start ")" | "x"'


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        (GrammarKind.REGEX, "a+b?", "aab", "ba"),
        (GrammarKind.CHOICES, '["yes", "no", "\\"quoted\\" \\n"]', '"quoted" \n', "maybe"),
        (GrammarKind.CONTEXT_FREE, NUMBERS, "1, 2, 3", "1, "),
        (GrammarKind.CONTEXT_FREE, LARK, "((x))", "((x)"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', '{"a": [1, null]}', "[1]"),
        (GrammarKind.JSON_SCHEMA, '{"enum": ["a", 2]}', "2", '"b"'),
        (GrammarKind.JSON_SCHEMA, "true", "12", "{1}"),
        # control characters stay where names are not in doubt
        (GrammarKind.JSON_SCHEMA, '{"const": "\\u0001"}', '"\\u0001"', '"a"'),
    ],
)
def test_every_kind_of_grammar(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    kind: GrammarKind,
    source: str,
    right: str,
    wrong: str,
) -> None:
    assert accepts(compiler, tokenizer, Grammar(kind, source), right)
    assert not accepts(compiler, tokenizer, Grammar(kind, source), wrong)


def nested(part: object) -> str:
    return json.dumps({"properties": {"a/b": {"items": {"anyOf": [{"type": "string"}, part]}}}})


def inside(schema: object) -> str:
    return f'start: first | second\nfirst: "x"\nsecond: %json {json.dumps(schema)}'


NO_TEXT = "no text is described by it"
PLACE = "grammar.json_schema/properties/a~1b/items/anyOf/1"


@pytest.mark.parametrize(
    ("kind", "source", "field", "problem"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "grammar.json_schema", "is no JSON"),
        (GrammarKind.JSON_SCHEMA, "[1]", "grammar.json_schema", "must be an object"),
        (GrammarKind.JSON_SCHEMA, "false", "grammar.json_schema", "must be an object, or true"),
        (GrammarKind.JSON_SCHEMA, nested({"type": "objekt"}), PLACE, "objekt"),
        (GrammarKind.JSON_SCHEMA, nested({"uniqueItems": True}), PLACE, "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, nested({"$ref": "#/$defs/none"}), PLACE, "none"),
        (GrammarKind.JSON_SCHEMA, nested({"pattern": "("}), PLACE, "unclosed group"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "integer", "minimum": 5, "maximum": 1}',
            "grammar.json_schema",
            "minimum",
        ),
        (GrammarKind.JSON_SCHEMA, nested({"enum": [2**53 + 1]}), f"{PLACE}/enum/0", "2^53"),
        (GrammarKind.REGEX, "(", "grammar.regex", "unclosed group"),
        (GrammarKind.CHOICES, "[]", "grammar.choices", f"1 to {MAX_CHOICES}"),
        (GrammarKind.CONTEXT_FREE, "start = nothing", "grammar.context_free", ""),
        (GrammarKind.REGEX, "a" * (MAX_REGEX_BYTES + 1), "grammar.regex", "at most"),
        # schemas inside a grammar are named by their rules
        (
            GrammarKind.CONTEXT_FREE,
            inside({"properties": {"a": {"type": "colour"}}}),
            "grammar.context_free.second/properties/a",
            "colour",
        ),
        (
            GrammarKind.CONTEXT_FREE,
            inside({"items": {"minimum": 2**60}}),
            "grammar.context_free.second/items/minimum",
            "2^53",
        ),
        # a grammar without a text says so
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "grammar.json_schema", NO_TEXT),
        (GrammarKind.REGEX, "[^\\s\\S]", "grammar.regex", NO_TEXT),
        (GrammarKind.CONTEXT_FREE, 'start: a\na: a "x"', "grammar.context_free", NO_TEXT),
        (
            GrammarKind.CONTEXT_FREE,
            " " * (MAX_GRAMMAR_BYTES + 1),
            "grammar.context_free",
            "at most",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_place(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, field: str, problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        compiler.follow(Grammar(kind, source))
    assert refused.value.field == field
    assert problem in refused.value.problem
    assert "NoExtension" not in str(refused.value)
    assert "non-verbose" not in str(refused.value)


def deep(levels: int) -> str:
    return '{"items": ' * levels + '{"type": "null"}' + "}" * levels


def chained(levels: int, **around: object) -> str:
    """Definitions, each of which leads to the next one."""
    names = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(levels)]
    inner = [{"properties": {"x": each}, **around} if around else each for each in names]
    definitions = {f"d{i}": each for i, each in enumerate(inner)}
    definitions[f"d{levels}"] = {"type": "string"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def laughs(levels: int, each: int, last: object) -> str:
    """Definitions, each of which refers to the next one several times."""
    names = [[{"$ref": f"#/$defs/d{i + 1}"}] * each for i in range(levels)]
    definitions: dict[str, object] = {f"d{i}": {"allOf": refs} for i, refs in enumerate(names)}
    definitions[f"d{levels}"] = last
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def anchors(count: int) -> str:
    named = {f"d{i}": {"$anchor": f"x{i}"} for i in range(count)}
    return json.dumps({"allOf": [{"$ref": f"#x{i}"} for i in range(count)], "$defs": named})


def optional(count: int, **more: object) -> str:
    return json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more})


def all_of(*parts: object) -> str:
    return json.dumps({"allOf": parts})


def rules(count: int, times: int, name: str = "a") -> str:
    rest = "\n".join(f"{name}{i}:" + f" {name}{i + 1}" * times for i in range(count))
    return f'start: {name}0\n{rest}\n{name}{count}: "x"'


HOSTILE = [
    (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    (GrammarKind.REGEX, "(a|aa|aaa|a?){500}(a|aa|aaa|a?){500}b"),
    (GrammarKind.REGEX, "(.*a){60}.{4000}"),
    (GrammarKind.REGEX, "[^\\s\\S]"),
    (GrammarKind.REGEX, "ab " * 80_000),
    (GrammarKind.JSON_SCHEMA, deep(5_000)),
    (GrammarKind.JSON_SCHEMA, deep(200)),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    (GrammarKind.JSON_SCHEMA, '{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}'),
    (GrammarKind.JSON_SCHEMA, chained(5_000)),
    (GrammarKind.JSON_SCHEMA, chained(4_000, type="object")),
    (GrammarKind.JSON_SCHEMA, chained(900)),
    (GrammarKind.JSON_SCHEMA, laughs(60, 3, {"enum": ["a", "b"]})),
    (GrammarKind.JSON_SCHEMA, laughs(60, 3, {"properties": {"a": {"type": "string"}}})),
    (GrammarKind.JSON_SCHEMA, laughs(60, 3, {"type": "integer", "multipleOf": 7})),
    (GrammarKind.JSON_SCHEMA, anchors(3_000)),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"w{i}" for i in range(20_000)]})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [{"a": i} for i in range(5_000)]})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"const": "ab " * 80_000})),
    (GrammarKind.JSON_SCHEMA, optional(3_000)),
    (GrammarKind.JSON_SCHEMA, optional(480)),
    (GrammarKind.JSON_SCHEMA, optional(1_000, additionalProperties=False, minProperties=1)),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 100000000}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "minItems": 100000000}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 999983}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 19997}'),
    (GrammarKind.JSON_SCHEMA, all_of(*({"type": "integer", "multipleOf": n} for n in (997, 991)))),
    (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"anyOf": [{"type": "integer", "multipleOf": n} for n in range(901, 999, 10)]}),
    ),
    (GrammarKind.JSON_SCHEMA, all_of(*({"type": "string", "pattern": f"a{i}"} for i in range(30)))),
    (
        GrammarKind.JSON_SCHEMA,
        all_of(
            *(
                {"anyOf": [{"type": "string", "pattern": f"a{j}{i}"} for i in range(8)]}
                for j in range(5)
            )
        ),
    ),
    (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"patternProperties": {f"^a{i:04}x*$": {} for i in range(1_000)}}),
    ),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^(a|b){1,10000}$"}'),
    (GrammarKind.CHOICES, json.dumps([f"choice {i}" for i in range(4096)])),
    (GrammarKind.CONTEXT_FREE, "start: start start | start start start | "),
    (GrammarKind.CONTEXT_FREE, 'start: a\na: a "x"'),
    (GrammarKind.CONTEXT_FREE, "start: " + "(" * 20_000),
    (GrammarKind.CONTEXT_FREE, rules(60, 2)),
    (GrammarKind.CONTEXT_FREE, rules(8_000, 1)),
    (GrammarKind.CONTEXT_FREE, rules(200, 2, "A")),
    (GrammarKind.CONTEXT_FREE, rules(5_000, 2).replace(":", " ::=").replace("start", "root")),
    (GrammarKind.CONTEXT_FREE, "start: " + " | ".join(f"/x{i}[a-z]*/" for i in range(8_000))),
    (
        GrammarKind.CONTEXT_FREE,
        "start: A\nA: " + " & ".join(f"/(.*a{i}.*)/" for i in range(30)),
    ),
    (GrammarKind.CONTEXT_FREE, "start: a\na: %json " + deep(200)),
    (GrammarKind.CONTEXT_FREE, 'start: %json {"type": "integer",\n"multipleOf": 999983}'),
]


@pytest.mark.parametrize(("kind", "source"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_end_soon(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    """Refused, or served within bounds: what a step may take is bounded as well."""
    begin, before = time.process_time(), resident_mib()
    with suppress(InputError):
        walk(compiler.follow(Grammar(kind, source)))
    assert time.process_time() - begin < 60  # only catches a hang
    assert resident_mib() - before < 250  # 60


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_few_are_kept_and_none_that_took_long_to_compile(compiler: GrammarCompiler) -> None:
    """Each of these takes 10 MiB or more."""
    before = resident_mib()
    for multiple in range(19_901, 19_901 + 2 * share(20, least=8), 2):
        schema = {"type": "integer", "multipleOf": multiple}
        compiler.follow(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert resident_mib() - before < 150
    for i in range(MOST_IDLE + 5):
        compiler.follow(Grammar(GrammarKind.REGEX, f"a{{{i + 1}}}"))
    compiler.follow(Grammar(GrammarKind.REGEX, "b"))
    assert sum(idle.seconds for _, idle in compiler._idle) <= MOST_IDLE_SECONDS
    assert len(compiler._idle) <= MOST_IDLE


@pytest.mark.parametrize(
    ("source", "place", "problem"),
    [
        (json.dumps({"items": {"multipleOf": 20_011}}), "/items/multipleOf", "at most 20000"),
        (
            json.dumps({"items": {"multipleOf": 200.11}}),
            "/items/multipleOf",
            "20011 without its point",
        ),
        (
            json.dumps({"prefixItems": [{"multipleOf": 10_001 + i} for i in range(20)]}),
            "/prefixItems/",
            "add up to",
        ),
        (
            json.dumps({"items": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}),
            "/items",
            "common multiple",
        ),
        (
            json.dumps(
                {
                    "$defs": {"n": {"type": "integer", "multipleOf": 997}},
                    "items": {"$ref": "#/$defs/n", "multipleOf": 991},
                }
            ),
            "/items",
            "common multiple",
        ),
        (json.dumps({"items": json.loads(optional(490))}), "/items", "1960 ways"),
        (
            json.dumps({"items": {"anyOf": [json.loads(optional(300))] * 2}}),
            "/items",
            "2401 ways",
        ),
        (deep(100), "/items" * 100, "nested too deeply"),
        (json.dumps({"items": {"enum": ["a" * 8193]}}), "/items/enum/0", "at most 8192"),
        (
            json.dumps({"items": {"patternProperties": {f"^a{i}$": {} for i in range(65)}}}),
            "/items/patternProperties",
            "at most 64",
        ),
        (json.dumps({"items": {"minProperties": 2}}), "/items/minProperties", "at most 1"),
        (
            json.dumps({"items": {"minProperties": 4, "required": ["a", "b"]}}),
            "/items/minProperties",
            "at most 3",
        ),
    ],
)
def test_what_would_take_too_much_is_refused_by_its_place(
    compiler: GrammarCompiler, source: str, place: str, problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        compiler.follow(Grammar(GrammarKind.JSON_SCHEMA, source))
    assert refused.value.field.startswith(f"grammar.json_schema{place}")
    assert problem in refused.value.problem
    with pytest.raises(InputError) as refused:
        compiler.follow(Grammar(GrammarKind.CONTEXT_FREE, f'start: a\na: "x" %json {source}'))
    assert refused.value.field.startswith(f"grammar.context_free.a{place}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (json.dumps({"type": "integer", "multipleOf": 10**6}), "-3000000"),
        (json.dumps({"allOf": [{"multipleOf": 0.01}, {"type": "number", "multipleOf": 5}]}), "15"),
        (optional(480), '{"p3": "a", "p479": "b", "q": 1}'),
        (optional(480, additionalProperties=False), '{"p3": "a", "p479": "b"}'),
        (optional(43, additionalProperties=False, minProperties=1), '{"p3": "a"}'),
        (deep(99), "[]"),
        (json.dumps({"type": "object", "minProperties": 2, "required": ["a"]}), '{"a": 1, "b": 2}'),
    ],
)
def test_what_is_within_the_bounds_is_served(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, text: str
) -> None:
    assert accepts(compiler, tokenizer, Grammar(GrammarKind.JSON_SCHEMA, source), text)


@pytest.mark.parametrize("shown", ["a", "\\u0061"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^b": {}},
            "additionalProperties": {"type": "string"},
        },
        {"patternProperties": {"^a": {"type": "integer"}}},
    ],
)
def test_a_name_is_held_to_its_own_schema_however_it_is_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, shown: str, schema: dict[str, object]
) -> None:
    written = json.dumps({"type": "object", **schema})
    for kind, source in (
        (GrammarKind.JSON_SCHEMA, written),
        (GrammarKind.CONTEXT_FREE, f"start: a\na: %json {written}"),
    ):
        for text in ('{"a": 1}', '{"a": 1, "c": "x"}'):
            assert accepts(compiler, tokenizer, Grammar(kind, source), text)
        for text in (f'{{"{shown}": "x"}}', f'{{"a": 1, "{shown}": "x"}}'):
            assert not accepts(compiler, tokenizer, Grammar(kind, source), text)


def test_what_the_library_raises_is_an_input_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """Like that of the library's bindings."""

    for raised in (ValueError("broken"), MemoryError(), PanicException("broken")):

        def fail(*_: object, raised: BaseException = raised) -> None:
            raise raised

        monkeypatch.setattr(GrammarCompiler, "_matcher", fail)
        with pytest.raises(InputError) as refused:
            compiler.follow(Grammar(GrammarKind.REGEX, "not seen before"))
        assert refused.value.field == "grammar.regex"


def walk(follower: GrammarFollower) -> None:
    """The first token that is allowed, again and again."""
    tokens: list[int] = []
    while len(tokens) < 20 and END not in tokens:
        allowed = follower.allowed(tokens)
        if allowed is None or not allowed.any():
            break
        tokens.append(int(np.flatnonzero(np.unpackbits(allowed, bitorder="little"))[0]))
