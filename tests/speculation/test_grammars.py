"""Texts that follow a grammar: the same in every mode, and what the grammar describes."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar, GrammarKind
from tests.processes import Output
from tests.speculation.generations import (
    OFF,
    SSD,
    SYNC,
    Pair,
    generate,
    violation,
    with_speculation,
)
from tests.speculation.random_schemas import random_schema
from tests.suite.scale import full_only, share

PROMPTS = (
    "Once upon a time there was a lamb. As JSON: ",
    "Tell me of the king and the river, please: ",
    "The wolf said:",
)
MOST_TOKENS = 160
ENDLESS_CHOICE = 'start: a~400 "b"\na: "a" | "a" a\n'
BATCH = 8


def request(schema: dict[str, Any], seed: int, temperature: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=PROMPTS[seed % len(PROMPTS)],
        sampling={"seed": seed, "temperature": temperature},
        stop={"max_tokens": MOST_TOKENS},
        grammar={"json_schema": json.dumps(schema)},
    )


def check_text(output: Output, schema: dict[str, Any], compiler: GrammarCompiler) -> bool:
    """Whether it has ended by itself; it is valid then, and else the beginning of what is."""
    if output.finish.reason == pb.FINISH_REASON_STOP:
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        return True
    assert output.finish.reason == pb.FINISH_REASON_LENGTH
    follower = compiler.follow(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert output.tokens
    assert follower.num_allowed([], output.tokens) == len(output.tokens)
    return False


@pytest.mark.parametrize("together", [full_only(1), BATCH])
def test_random_schemas(pair: Pair, together: int, compiler: GrammarCompiler) -> None:
    """Every answer that ends by itself parses and validates, and nearly all do."""
    rng = random.Random(together)
    schemas = [random_schema(rng) for _ in range(share(100))]
    messages = [request(s, seed, t) for seed, s in enumerate(schemas) for t in (0.0, 1.0)]
    rows = pair.in_every_mode(messages, together)
    outputs = [row[0] for row in rows]
    speculated = [row[2].finish.speculation for row in rows]
    assert sum(each.accepted_tokens for each in speculated) > 0
    assert sum(each.hits + each.late for each in speculated) > 0
    assert sum(each.finish.speculation.grammar_rounds for each in outputs) > 0
    asked = [schema for schema in schemas for _ in range(2)]
    ended = [
        check_text(output, schema, compiler) for output, schema in zip(outputs, asked, strict=True)
    ]
    assert sum(ended) >= 0.95 * len(ended)
    print(f"{sum(ended)} of {len(ended)} have ended by themselves")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"grammar": {"json_schema": '{"type": "objekt"}'}}, "grammar.json_schema"),
        ({"grammar": {"regex": "("}}, "grammar.regex"),
        ({"grammar": {"regex": "a+"}, "stop": {"ignore_eos": True}}, "stop.ignore_eos"),
        ({"grammar": {"regex": "a+"}, "stop": {"min_tokens": 3}}, "stop.min_tokens"),
        (
            {"grammar": {"regex": "a+"}, "generated_token_ids": bytes([5, 0, 0, 0])},
            "generated_token_ids",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    pair: Pair, changes: dict[str, Any], field: str
) -> None:
    assert violation(pair.target, pb.GenerateRequest(text="Once", **changes)).field == field


def test_a_text_that_its_grammar_does_not_let_go_on_is_the_callers_fault(pair: Pair) -> None:
    """Compiled without a problem: its second token is beyond the parser's bounds."""
    message = pb.GenerateRequest(text="One", grammar={"context_free": ENDLESS_CHOICE})
    for mode in (OFF, SYNC, SSD):
        with pytest.raises(grpc.RpcError, match=r"grammar: .*Too many items") as refused:
            generate(pair.target, with_speculation(message, mode=mode))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_others_go_on_beside_a_grammar_that_takes_long(pair: Pair) -> None:
    """One identity's grammars are compiled one after the other; texts of others do not wait."""
    text = pb.GenerateRequest(text=PROMPTS[0], sampling={"seed": 1}, stop={"max_tokens": 40})
    (expected,) = pair.plain.of([text])
    sources = [json.dumps({"type": "integer", "multipleOf": 19_900 + i}) for i in range(1, 6, 2)]
    sources.append('{"type": "integer", "multipleOf": 999983}')
    with ThreadPoolExecutor(len(sources)) as pool:
        slow = [pool.submit(generate, pair.target, _held(source)) for source in sources]
        while not all(each.done() for each in slow):
            output = generate(pair.target, text)
            assert (output.text, output.tokens) == expected
        *served, refused = slow
        assert all(each.result().tokens for each in served)
        with pytest.raises(grpc.RpcError, match="multipleOf"):
            refused.result()


def _held(source: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="One", stop={"max_tokens": 8}, grammar={"json_schema": source}, sampling={"seed": 1}
    )
