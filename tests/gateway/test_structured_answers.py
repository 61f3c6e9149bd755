"""Structured output and calls of tools by the openai SDK, held to their grammars by a real pair."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.gateway.callers import sdk_of
from tests.processes import TracedPair
from tests.processes import gateway as start_gateway

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a brave hen."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["hen", "fox"]},
        "years": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["hero", "kind", "years"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("find_hero", "feed_hero")
]


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "stories-target", "messages": MESSAGES, "seed": 3, "max_tokens": 200}
    return sdk.chat.completions.create(**given, **more)


def test_an_answer_follows_its_schema(caller: openai.OpenAI) -> None:
    answer = ask(caller, response_format=form_of(SCHEMA))
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


@pytest.fixture(scope="module")
def caller(
    traced_pair: TracedPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """In front of a model whose template knows no tools: the grammar makes it write calls."""
    folder, flags = tmp_path_factory.mktemp("caller"), ("--tool-parser", "hermes")
    with start_gateway(folder, *flags, targets=[traced_pair[0].address]) as process:
        yield sdk_of(process)


def test_a_named_tool_is_the_one_that_is_called_and_streams_alike(caller: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "feed_hero"}}
    asked = {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
    (call,) = ask(caller, **asked).choices[0].message.tool_calls
    assert call.function.name == "feed_hero"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    choices = [chunk.choices[0] for chunk in ask(caller, **asked, stream=True) if chunk.choices]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    assert "".join(each.function.arguments or "" for each in pieces) == call.function.arguments


def test_an_answer_beside_tools_follows_its_schema_or_is_a_call(caller: openai.OpenAI) -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    held: Any = {"tools": tools, "response_format": form_of(SCHEMA), "parallel_tool_calls": False}
    message = ask(caller, **held).choices[0].message
    calls = [call.function.arguments for call in message.tool_calls or ()]
    for text in calls or [message.content]:
        jsonschema.validate(json.loads(text), SCHEMA)


# No grammar holds it.
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
DEEP = functools.reduce(lambda schema, _: {"items": schema}, range(200), {"type": "null"})
LARK = f"start: a\na: %json {json.dumps(DEEP)}"
THIRD = {"name": "third", "parameters": UNIQUE, "strict": True}
DEAD_END = {"ebnf": 'start: a~400 "b"\na: "a" | "a" a\n'}


@pytest.mark.parametrize(
    ("more", "place", "words"),
    [
        (
            {"response_format": form_of(UNIQUE)},
            "response_format.json_schema.schema/properties/a",
            "uniqueItems",
        ),
        (
            {"tools": [*TOOLS, {"type": "function", "function": THIRD}]},
            "tools[2].function.parameters/properties/a",
            "uniqueItems",
        ),
        # A rule with which a text cannot go on.
        ({"extra_body": DEAD_END}, "ebnf", "Too many items"),
        ({"extra_body": DEAD_END, "stream": True}, "ebnf", "Too many items"),
        (
            {"response_format": form_of(DEEP), "tools": TOOLS},
            "response_format.json_schema.schema",
            "nested too deeply",
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": LARK}}},
            "structured_outputs.grammar",
            "nested too deeply",
        ),
    ],
)
def test_what_no_text_can_be_held_to_is_the_callers_fault(
    caller: openai.OpenAI, more: dict[str, Any], place: str, words: str
) -> None:
    with pytest.raises(openai.APIError, match=words) as caught:
        list(ask(caller, **more))
    assert caught.value.type == "invalid_request_error"
    assert isinstance(caught.value, openai.BadRequestError) or "stream" in more
    assert str(caught.value.param).startswith(place)
