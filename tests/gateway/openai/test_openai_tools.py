"""Tools, choices of tools and messages with calls become a target's request."""

import json
import re
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.reasoning import Thinking
from ssd_gateway.http.errors import ApiError
from ssd_gateway.openai.fields import ChatRequest, read_fields
from ssd_gateway.openai.tools import IGNORED, MAX_TOOLS
from ssd_gateway.openai.translation import TranslatedRequest, translate_chat
from tests.gateway.chat_formats.pieces import message_of

USER = {"role": "user", "content": "What is the weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def ask(form: str = "hermes", thinking: Any = None, **content: Any) -> TranslatedRequest:
    body = json.dumps({"messages": [USER], **content}).encode()
    own = pb.ChatFormat(tools=form, **(thinking or {}))
    return translate_chat(read_fields(body, ChatRequest, False), "id", own)


def request(**content: Any) -> pb.GenerateRequest:
    return ask(**content).requests[0]


def grammar_of(**content: Any) -> str:
    return str(request(**content).grammar.context_free)


def refused(**content: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        ask(**content)
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


def test_tools_go_to_the_template_but_for_what_is_null_or_ignored() -> None:
    schema = {"properties": {"a": {"const": None}}}
    tools = [tool(strict=False, description="é", x=[1]), tool("time", parameters=schema)]
    told = request(tools=tools).chat.tools_json
    assert told == json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode()
    more = [{**each, "y": None, **{name: {"type": "x"} for name in IGNORED}} for each in tools]
    more[0]["function"] = {**more[0]["function"], "z": None}
    assert request(tools=more).chat.tools_json == told
    assert request(tools=tools, tool_choice="none").chat.tools_json == b""
    assert request(tools=[]).chat.tools_json == b""


@pytest.mark.parametrize("choice", ["required", named("weather"), "auto"])
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_where_calls_are_forced_cut_markup_is_no_content(form: str, choice: Any) -> None:
    reading = ask(form, tools=[tool()], tool_choice=choice).reading
    key = "arguments" if form == "hermes" else "parameters"
    call = f'{{"name": "weather", "{key}": {{"city": "Ulm"}}}}'
    text = f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call
    for end in range(len(text) + 1):
        message = message_of(reading.parser(""), list(text[:end]))
        assert choice == "auto" or not message["content"], text[:end]
    assert message["calls"] == [("weather", '{"city": "Ulm"}')]


def test_calls_are_read_only_where_they_may_come() -> None:
    reading = ask(tools=[tool(), tool("time")]).reading
    assert (reading.tools is None, reading.names) == (False, {"weather", "time"})
    for content in ({}, {"tools": [tool()], "tool_choice": "none"}):
        assert ask(**content).reading.tools is None


@pytest.mark.parametrize(
    ("content", "has"),
    [
        ({}, False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, False),
        ({"tool_choice": "none"}, False),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [tool(strict=True)]}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": named("weather")}, True),
    ],
)
def test_calls_have_a_grammar_where_something_is_asked_of_them(
    content: dict[str, Any], has: bool
) -> None:
    translated = ask(**{"tools": [tool()], **content})
    assert bool(translated.requests[0].grammar.context_free) == has
    place = "grammar.context_free"
    parameters = {f"{place}.arguments_0": "tools[0].function.parameters"}
    params = {theirs: ours for theirs, ours in translated.params.items() if place in theirs}
    assert params == ({**parameters, place: "tools"} if has else {})


def test_an_answer_with_a_schema_may_be_calls_instead() -> None:
    answer = {"type": "json_schema", "json_schema": {"schema": {"enum": ["sun", "rain"]}}}
    content = {"tools": [tool(), tool("time")], "response_format": answer}
    translated = ask(**content)
    assert "(answer | call" in translated.requests[0].grammar.context_free
    assert translated.params["grammar.context_free.answer"] == "response_format.json_schema.schema"
    for kind in ({"regex": "a/b\n"}, {"structured_outputs": {"choice": ["a", "b"]}}):
        assert "answer: " in grammar_of(tools=[tool()], **kind)
    assert "answer" not in grammar_of(tool_choice="required", **content)  # there is none
    params = ask(tool_choice=named("time"), **content).params
    assert params["grammar.context_free.arguments_0"] == "tools[1].function.parameters"
    without = request(tool_choice="none", **content)
    assert json.loads(without.grammar.json_schema) == {"enum": ["sun", "rain"]}


def test_thoughts_come_before_an_answer_with_a_schema() -> None:
    answer = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    inside = {"thinks": True, "begins_thinking": True}
    translated = ask("", inside, response_format=answer)
    assert "start: thought answer" in translated.requests[0].grammar.context_free
    assert translated.params["grammar.context_free.answer"] == "response_format.json_schema.schema"


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_named_tool_is_the_only_one_and_called_once(parallel: bool | None) -> None:
    tools: Any = {"tools": [tool(), tool("time")], "parallel_tool_calls": parallel}
    translated = ask(**tools, tool_choice=named("time"))
    grammar = translated.requests[0].grammar.context_free
    assert not re.search(r"call\)\*|weather", grammar)
    assert "time" in grammar
    several = grammar_of(**tools, tool_choice="required")
    assert ("call)*" in several) == (parallel is not False)
    assert b"weather" in translated.requests[0].chat.tools_json


def test_only_strict_tools_are_held_to_their_schemas_by_themselves() -> None:
    tools = [tool(strict=True), tool("time", parameters={"properties": {"zone": {}}})]
    assert "city" in grammar_of(tools=tools)
    assert "zone" not in grammar_of(tools=tools)
    assert "zone" in grammar_of(tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), {**tool(), "function": {}}]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("time")}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("time")}, "tool_choice"),
        ({"tools": [tool()], "ebnf": 'start: "a"'}, "ebnf"),
        ({"tools": [tool()], "ebnf": 'start: "a"', "tool_choice": "required"}, "ebnf"),
    ],
)
def test_what_is_wrong_is_refused_by_name(content: dict[str, Any], param: str) -> None:
    assert refused(**content)[0] == param


@pytest.mark.parametrize("form", ["", "none", "harmony"])
def test_a_model_whose_format_is_not_known_has_no_tools(form: str) -> None:
    param, words = refused(form=form, tools=[tool()])
    assert param == "tools"
    assert "--tool-parser hermes|llama3" in words
    assert request(form=form, tools=[tool()], tool_choice="none").chat.tools_json == b""


def messages(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "name": "bot"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sun"}]},
    ]


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"é": [1.0]}', {"é": [1.0]}), ("", {}), ({"a": 1}, {"a": 1})]
)
def test_arguments_of_earlier_calls_are_objects(arguments: Any, parsed: Any) -> None:
    chat = request(messages=messages(arguments)).chat
    assert json.loads(chat.messages_json) == messages(parsed)


@pytest.mark.parametrize("arguments", ["{", "[1]", "1"])
def test_arguments_that_are_no_objects_are_refused(arguments: str) -> None:
    param, _ = refused(messages=messages(arguments))
    assert param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("form", "content", "expected"),
    [
        ({}, {}, (Thinking.NEVER, False)),
        ({"thinks": True}, {}, (Thinking.MAYBE, False)),
        ({"thinks": True, "begins_thinking": True}, {}, (Thinking.INSIDE, False)),
        ({"thinks": True}, {"regex": "a"}, (Thinking.MAYBE, False)),
        ({"thinks": True}, {"ebnf": 'start: "a"'}, (Thinking.NEVER, False)),
        ({"thinks": True}, {"reasoning_effort": "low"}, (Thinking.MAYBE, True)),
        (
            {"thinks": True, "begins_thinking": True},
            {"chat_template_kwargs": {"enable_thinking": False}},
            (Thinking.MAYBE, True),
        ),
        (
            {"thinks": True, "begins_thinking": True},
            {"continue_final_message": True},
            (Thinking.NEVER, False),
        ),
        (
            {"thinks": True},
            {
                "continue_final_message": True,
                "messages": [USER, {"role": "assistant", "content": "<think>So"}],
            },
            (Thinking.INSIDE, False),
        ),
    ],
)
def test_where_thoughts_are_looked_for(
    form: dict[str, bool], content: dict[str, Any], expected: tuple[Thinking, bool]
) -> None:
    translated = ask("", form, **content)
    reading = translated.reading
    assert (reading.thinking, reading.by_prompt) == expected
    assert translated.requests[0].return_prompt == reading.by_prompt
