"""Structured output and calls of tools by the openai SDK, held to their grammars by a real pair."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.processes import GatewayProcess, TracedPair
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


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "stories-target", "messages": MESSAGES, "seed": 3, "max_tokens": 200}
    return sdk.chat.completions.create(**given, **more)


@pytest.mark.parametrize("mode", ["off", "sync", "ssd"])
def test_an_answer_follows_its_schema(sdk: openai.OpenAI, mode: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA}}
    answer = ask(sdk, response_format=form, extra_body={"speculation": {"mode": mode}})
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_every_way_to_name_a_grammar(sdk: openai.OpenAI) -> None:
    told = [
        ask(sdk, **more).choices[0].message.content
        for more in (
            {"extra_body": {"structured_outputs": {"choice": ["red fox", "white hen"]}}},
            {"extra_body": {"regex": "(red fox|white hen)"}},
            {"extra_body": {"ebnf": 'root ::= "red fox" | "white hen"'}},
        )
    ]
    assert set(told) <= {"red fox", "white hen"}
    answer = ask(sdk, response_format={"type": "json_object"}, temperature=0)
    assert answer.choices[0].message.content.startswith("{")


def test_a_schema_that_cannot_be_held_is_named(sdk: openai.OpenAI) -> None:
    wrong = {"properties": {"a": {"items": {"uniqueItems": True}}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(sdk, response_format=form)
    assert "uniqueItems" in refused.value.message
    assert refused.value.param == "response_format.json_schema.schema/properties/a/items"


@pytest.fixture(scope="module", params=["hermes", "llama3"])
def caller(
    request: pytest.FixtureRequest,
    traced_pair: TracedPair,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[openai.OpenAI]:
    """In front of a model whose template knows no tools: the grammar makes it write calls."""
    folder: Path = tmp_path_factory.mktemp("caller")
    flags = ("--tool-parser", request.param)
    with start_gateway(folder, *flags, targets=[traced_pair[0].address]) as process:
        yield connected(process)


def connected(process: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0)


def test_a_call_that_is_required_has_arguments_of_its_schema(caller: openai.OpenAI) -> None:
    answer = ask(caller, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("find_hero", "feed_hero")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_named_tool_is_the_one_that_is_called_and_streams_alike(caller: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "feed_hero"}}
    whole = ask(caller, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "feed_hero"
    pieces = [
        piece.function.arguments or ""
        for chunk in ask(
            caller, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, stream=True
        )
        if chunk.choices
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(pieces) == call.function.arguments


def test_an_answer_beside_tools_follows_its_schema_or_is_a_call(caller: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA}}
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for temperature in (0.0, 1.0):
        answer = ask(
            caller,
            tools=tools,
            response_format=form,
            parallel_tool_calls=False,
            temperature=temperature,
        )
        message = answer.choices[0].message
        texts = [call.function.arguments for call in message.tool_calls or ()]
        for text in texts or [message.content]:
            jsonschema.validate(json.loads(text), SCHEMA)


def test_a_tool_whose_schema_cannot_be_held_is_named(caller: openai.OpenAI) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "third", "parameters": wrong, "strict": True}
    tools = [*TOOLS, {"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(caller, tools=tools)
    assert refused.value.param == "tools[2].function.parameters/properties/a"
    assert "uniqueItems" in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_rule_that_its_text_cannot_go_on_with_is_the_callers(
    caller: openai.OpenAI, stream: bool
) -> None:
    rule = {"ebnf": 'start: a~400 "b"\na: "a" | "a" a\n'}
    with pytest.raises(openai.APIError) as refused:
        list(ask(caller, extra_body=rule, stream=stream))
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "ebnf")
    assert "Too many items" in refused.value.message
    if not stream:
        assert isinstance(refused.value, openai.BadRequestError)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_that_is_nested_too_deeply_is_named(caller: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(200)}}
    lark = f"start: a\na: %json {json.dumps(nested(200))}"
    for more, place in (
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"response_format": form, "tools": TOOLS}, "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"grammar": lark}}}, "structured_outputs.grammar"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(caller, **more)
        assert str(refused.value.param).startswith(place)
        assert "nested too deeply" in refused.value.message
