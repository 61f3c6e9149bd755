"""Grammars are compiled, or refused by the place that is wrong; work is bounded."""

import json
import time
from contextlib import suppress

import numpy as np
import pytest

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import MAX_CHOICES, MOST_IDLE, GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer

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
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), "grammar.regex", "at most"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_place(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, field: str, problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        compiler.follow(Grammar(kind, source))
    assert refused.value.field == field
    assert problem in refused.value.problem


def deep(levels: int) -> str:
    return '{"items": ' * levels + '{"type": "null"}' + "}" * levels


HOSTILE = [
    (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    (GrammarKind.REGEX, "(a|aa|aaa|a?){500}(a|aa|aaa|a?){500}b"),
    (GrammarKind.REGEX, "(.*a){60}.{4000}"),
    (GrammarKind.REGEX, "[^\\s\\S]"),
    (GrammarKind.JSON_SCHEMA, deep(5_000)),
    (GrammarKind.JSON_SCHEMA, deep(200)),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    (GrammarKind.JSON_SCHEMA, '{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}'),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"w{i}" for i in range(20_000)]})),
    (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3_000)}}),
    ),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 100000000}'),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "minItems": 100000000}'),
    (GrammarKind.CONTEXT_FREE, "start: start start | start start start | "),
    (GrammarKind.CONTEXT_FREE, 'start: a\na: a "x"'),
    (GrammarKind.CONTEXT_FREE, "start: " + "(" * 20_000),
    (
        GrammarKind.CONTEXT_FREE,
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"',
    ),
]


@pytest.mark.parametrize(("kind", "source"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_end_soon(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    """Refused, or served within bounds: what a step may take is bounded as well."""
    begin = time.process_time()
    with suppress(InputError):
        walk(compiler.follow(Grammar(kind, source)))
    assert time.process_time() - begin < 60  # far above what was seen: it only catches a hang


def walk(follower: GrammarFollower) -> None:
    """The first token that is allowed, again and again."""
    tokens: list[int] = []
    while len(tokens) < 20 and END not in tokens:
        allowed = follower.allowed(tokens)
        if allowed is None or not allowed.any():
            break
        tokens.append(int(np.flatnonzero(np.unpackbits(allowed, bitorder="little"))[0]))


def test_few_are_kept(compiler: GrammarCompiler) -> None:
    for i in range(MOST_IDLE + 5):
        compiler.follow(Grammar(GrammarKind.REGEX, f"a{{{i + 1}}}"))
    compiler.follow(Grammar(GrammarKind.REGEX, "b"))
    assert len(compiler._idle) <= MOST_IDLE


def test_one_that_was_used_is_used_again_from_its_beginning(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar(GrammarKind.REGEX, "once upon a (time|day)")
    first = compiler.follow(grammar)
    fresh = first.allowed([])
    walk(first)
    matcher = first.at([])
    del first
    again, other = compiler.follow(grammar), compiler.follow(grammar)
    assert again.at([]) is matcher
    assert other.at([]) is not matcher
    assert np.array_equal(again.allowed([]), fresh)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "place", "problem"),
    [
        ({"properties": {"a": {"type": "colour"}}}, ".second/properties/a", "colour"),
        ({"items": {"minimum": 2**60}}, ".second/items/minimum", "2^53"),
    ],
)
def test_schemas_inside_a_grammar_are_named_by_their_rules(
    compiler: GrammarCompiler, wrong: dict[str, object], place: str, problem: str
) -> None:
    rules = ["start: first | second", 'first: %json {"type": "string"}']
    rules.append(f"second: %json {json.dumps(wrong)}")
    with pytest.raises(InputError) as refused:
        compiler.follow(Grammar(GrammarKind.CONTEXT_FREE, "\n".join(rules)))
    assert refused.value.field == f"grammar.context_free{place}"
    assert problem in refused.value.problem
