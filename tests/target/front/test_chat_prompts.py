"""Chats in JSON and as fields: every message is checked, and named by its place if it is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_target.front.chat_prompts import (
    MAX_CHAT_MESSAGES,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_TOOLS,
    ParsedChat,
    parse_chat,
)
from tests.suite.scale import share

USER = {"role": "user", "content": "Hi"}


def as_json(*messages: Any, **options: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages_json=json.dumps(messages).encode(), **options)


def as_fields(*contents: str, **options: Any) -> pb.ChatPrompt:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.ChatPrompt(messages=messages, **options)


def parsed(*messages: Any, **options: Any) -> ParsedChat:
    return parse_chat(as_json(*messages, **options))


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


def test_json_says_what_fields_say() -> None:
    one, other = parsed(USER), parse_chat(as_fields("Hi"))
    assert one.messages == other.messages == [USER]
    assert one.num_text_bytes == other.num_text_bytes == 2
    assert (one.options.field, other.options.field) == ("chat.messages_json", "chat.messages")


def test_what_else_a_message_has_is_left_as_it_is() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": [1.5]}}}
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "ops"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "So."},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert parsed(*messages).messages == messages
    assert parsed(messages[1]).num_text_bytes == len("id1typefunctionfunctionnamefarguments") + 2


@pytest.mark.parametrize(("texts", "content"), [(("one", "", "two"), "one\n\ntwo"), ((), "")])
def test_texts_in_parts_are_lines_of_one_text(texts: tuple[str, ...], content: str) -> None:
    parts = [{"type": "text", "text": text} for text in texts]
    assert parsed({"role": "user", "content": parts}).messages[0]["content"] == content


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
WRONG: dict[str, tuple[list[Any], str]] = {
    "no message": ([], "chat.messages_json: is empty"),
    "too many": ([USER] * (MAX_CHAT_MESSAGES + 1), "chat.messages_json: at most 4096, got 4097"),
    "no object": ([USER, "Hi"], "chat.messages_json[1]: must be an object"),
    "no role": ([{"content": "Hi"}], "chat.messages_json[0].role: must have 1 to 64"),
    "empty role": ([{"role": ""}], "chat.messages_json[0].role: must have 1 to 64"),
    "long role": ([{"role": "é" * 33}], "chat.messages_json[0].role: must have 1 to 64"),
    "a role that is a number": ([{"role": 1}], "chat.messages_json[0].role: must have 1 to 64"),
    "a content that is a number": (
        [USER, {"role": "user", "content": 3}],
        "chat.messages_json[1].content: must be a string, null or a list",
    ),
    "a part that is a text": (
        [{"role": "user", "content": ["Hi"]}],
        "chat.messages_json[0].content[0]: must be an object",
    ),
    "a part without a type": (
        [{"role": "user", "content": [{"text": "Hi"}]}],
        "chat.messages_json[0].content[0].type: only text is served here, got 'None'",
    ),
    "an image": (
        [USER, USER, {"role": "user", "content": [{"type": "text", "text": "this:"}, IMAGE]}],
        "chat.messages_json[2].content[1].type: only text is served here, got 'image_url'",
    ),
    "a part without a text": (
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        "chat.messages_json[0].content[0].text: must be a string",
    ),
    "too deep": (
        [USER, {**USER, "x": nested(MAX_JSON_DEPTH)}],
        "chat.messages_json[1]: at most 32 levels",
    ),
    "too much": (
        [USER, {**USER, "x": [[]] * MAX_JSON_VALUES}],
        "chat.messages_json: at most 131072 values",
    ),
}


@pytest.mark.parametrize(("messages", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_is_named_by_its_place(messages: list[Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        parsed(*messages)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"role": "user"}',
        b'[{"role": "user", "content": "\xff"}]',
        b'[{"role": "user", "content": "\\ud800"}]',  # would pass for a mark of ours
        b'[{"role": "user", "content": "\\udfff "}]',
        b'[{"role": "user", "x": NaN}]',
        b'[{"role": "user", "x": 1e999}]',
        b"[" * 200_000,
        b'[{"role": "user"}]\0',
        "\ufeff[]".encode(),
        '[{"role":"user"}]'.encode("utf-16"),
    ],
)
def test_what_is_no_list_in_json_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^chat.messages_json: (is no JSON|must be|at most)"):
        parse_chat(pb.ChatPrompt(messages_json=data))


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (as_fields("Hi", messages_json=b"[]"), "chat.messages_json: is in place of chat.messages"),
        (pb.ChatPrompt(), "chat.messages: is empty"),
        (
            as_json(USER, continue_final_message=True, add_generation_prompt=True),
            "chat.continue_final_message: cannot be together",
        ),
        (
            as_json(USER, {"role": "assistant"}, continue_final_message=True),
            "chat.messages_json[1].content: must be a text",
        ),
        (
            as_json(USER, {"role": "assistant", "content": None}, continue_final_message=True),
            "chat.messages_json[1].content: must be a text",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(chat: pb.ChatPrompt, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_chat(chat)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("given_options", "opens", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": True}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_a_turn_begins_unless_the_last_message_is_continued(
    given_options: dict[str, bool], opens: bool, continues: bool
) -> None:
    for chat in (as_fields("Hi", **given_options), as_json(USER, **given_options)):
        options = parse_chat(chat).options
        assert (options.add_generation_prompt, options.continue_final_message) == (opens, continues)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"é": [1.5]}}}


def test_tools_are_left_as_they_are() -> None:
    chat = parsed(USER, tools_json=json.dumps([TOOL, {}]).encode())
    assert chat.tools == [TOOL, {}]
    assert chat.num_text_bytes == 2 + len("typefunctionfunctionnamefparameters") + 2
    assert parsed(USER).tools == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "chat.tools_json: is no JSON"),
        (b"{}", "chat.tools_json: must be a list of tools"),
        (b"[{}, 1]", "chat.tools_json[1]: must be an object"),
        (b"[" * 200_000, "chat.tools_json: at most 32 levels in a tool"),
        (b"[{}," + b"[" * 40 + b"]" * 40 + b"]", "chat.tools_json[1]: at most 32 levels in a tool"),
        (json.dumps([{}] * (MAX_TOOLS + 1)).encode(), "chat.tools_json: at most 1024, got 1025"),
        (
            json.dumps([{"x": [1] * MAX_JSON_VALUES}]).encode(),
            "chat.tools_json: at most 131072 values",
        ),
    ],
)
def test_wrong_tools_are_named_by_their_place(data: bytes, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parsed(USER, tools_json=data)
    assert str(caught.value).startswith(words)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner)
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=3) | VALUES)
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_any_json_is_parsed_or_refused_by_its_place(value: Any) -> None:
    found = messages_or_place(pb.ChatPrompt(messages_json=json.dumps(value).encode()))
    if isinstance(found, str):
        assert found.startswith("chat.messages_json")
    else:
        assert [each["role"] for each in found] == [each["role"] for each in value]
        assert all(isinstance(each.get("content"), str | None) for each in found)


def messages_or_place(chat: pb.ChatPrompt) -> list[dict[str, Any]] | str:
    try:
        return parse_chat(chat).messages
    except InputError as error:
        return error.field
