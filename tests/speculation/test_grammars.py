"""Texts that follow a grammar: the same in every mode, and what the grammar describes."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.processes import Output
from tests.speculation.generations import (
    OFF,
    SSD,
    SYNC,
    Generations,
    Pair,
    generate,
    wait_until_up,
    with_speculation,
)
from tests.speculation.random_schemas import random_schema
from tests.suite.scale import share

PROMPTS = (
    "Once upon a time there was a lamb. As JSON: ",
    "Tell me of the king and the river, please: ",
    "The wolf said:",
)
MOST_TOKENS = 160
LISTED = '''start: word ", " word ", " word
word: /[a-z]{2,6}/ | "(" /[a-z]{2,6}/ ")"'''
ENDLESS_CHOICE = 'start: a~400 "b"\na: "a" | "a" a\n'
BATCH = 8


def request(schema: dict[str, Any], seed: int, temperature: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=PROMPTS[seed % len(PROMPTS)],
        sampling={"seed": seed, "temperature": temperature},
        stop={"max_tokens": MOST_TOKENS},
        grammar={"json_schema": json.dumps(schema)},
    )


def in_every_mode(pair: Pair, messages: list[pb.GenerateRequest], together: int) -> list[Output]:
    """Equal texts, so many requests at a time; returns one of each three."""
    wait_until_up(pair.target, pair.draft.address)
    outputs: dict[int, list[Output]] = {}
    for mode in (OFF, SYNC, SSD):
        own = [with_speculation(message, mode=mode) for message in messages]
        outputs[mode] = []
        for begin in range(0, len(own), together):
            with Generations(pair.target, own[begin : begin + together]) as running:
                pass
            outputs[mode] += running.outputs
    for other in (outputs[SYNC], outputs[SSD]):
        for plain, speculated in zip(outputs[OFF], other, strict=True):
            assert speculated.tokens == plain.tokens
            assert speculated.finish.reason == plain.finish.reason
    stats = [output.finish.speculation for output in outputs[SSD]]
    assert sum(each.cache_tokens for each in stats) > 0
    assert sum(each.hits + each.late for each in stats) > 0
    assert sum(each.accepted_tokens for each in stats) > 0
    assert sum(each.finish.speculation.grammar_rounds for each in outputs[OFF]) > 0
    return outputs[OFF]


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


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    directory = resolve_model("stories-target")
    config = load_model_config(directory)
    tokenizer = Tokenizer(directory, config)
    return GrammarCompiler(tokenizer.serialized(), config.vocab_size, config.eos_token_ids)


@pytest.mark.parametrize("together", [1, BATCH])
def test_random_schemas(pair: Pair, together: int, compiler: GrammarCompiler) -> None:
    """Every answer that ends by itself parses and validates, and nearly all do."""
    rng = random.Random(together)
    schemas = [random_schema(rng) for _ in range(share(100))]
    messages = [request(s, seed, t) for seed, s in enumerate(schemas) for t in (0.0, 1.0)]
    outputs = in_every_mode(pair, messages, together)
    asked = [schema for schema in schemas for _ in range(2)]
    ended = [
        check_text(output, schema, compiler) for output, schema in zip(outputs, asked, strict=True)
    ]
    assert sum(ended) >= 0.95 * len(ended)
    print(f"{sum(ended)} of {len(ended)} have ended by themselves")


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ({"regex": "(yes|no), [a-z]{3,9}!"}, "(yes|no), [a-z]{3,9}!"),
        ({"choices": {"texts": ["red wine", "green tea"]}}, "red wine|green tea"),
        ({"context_free": LISTED}, r"(\(?[a-z]{2,6}\)?, ){2}\(?[a-z]{2,6}\)?"),
    ],
)
def test_every_kind_of_rule(pair: Pair, grammar: dict[str, Any], expected: str) -> None:
    message = pb.GenerateRequest(
        text=PROMPTS[0],
        sampling={"seed": 3, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
        stop={"max_tokens": 60},
        logprobs={"top_n": 2},
        grammar=grammar,
    )
    texts = [generate(pair.target, with_speculation(message, mode=m)) for m in (OFF, SYNC, SSD)]
    assert re.fullmatch(expected, texts[0].text)
    assert all(each.tokens == texts[0].tokens for each in texts)
    assert all(each.logprobs == texts[0].logprobs for each in texts)


def test_a_text_that_is_cut_short_is_the_beginning_of_one(
    pair: Pair, compiler: GrammarCompiler
) -> None:
    schema = {"type": "array", "items": {"type": "string", "minLength": 30}, "minItems": 5}
    message = request(schema, 1, 1.0)
    message.stop.max_tokens = 20
    output = generate(pair.target, message)
    assert not check_text(output, schema, compiler)
    with pytest.raises(AssertionError):
        check_text(output, {"type": "integer"}, compiler)
    assert output.text.startswith('["')
    message.generated_token_ids = b"".join(t.to_bytes(4, "little") for t in output.tokens[:11])
    resumed = generate(pair.target, message)
    assert output.tokens[11:] == resumed.tokens


def test_rejection_follows_a_schema_too(pair: Pair, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for seed in range(4):
        message = with_speculation(request(schema, seed, 1.0), mode=SYNC)
        message.speculation.verification = pb.VERIFICATION_MODE_REJECTION
        assert check_text(generate(pair.target, message), schema, compiler)


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
    with pytest.raises(grpc.RpcError) as refused:
        generate(pair.target, pb.GenerateRequest(text="Once", **changes))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(field)


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
    sources = [json.dumps({"type": "integer", "multipleOf": 19_900 + i}) for i in range(1, 20, 2)]
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
