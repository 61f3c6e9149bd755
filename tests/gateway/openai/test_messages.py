"""What chat templates get of messages: what asks for something, and is not ignored."""

import copy
from typing import Any

import pytest

from ssd_gateway.http.errors import ApiError
from ssd_gateway.openai.messages import IGNORED, IGNORED_OF_CALLS, messages_for_template

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": ""},
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "x"}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm", "name": "b"},
    {"role": "tool", "tool_call_id": "a", "content": "Sun"},
]


def changed(of_messages: dict[str, Any], of_calls: dict[str, Any]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(MESSAGES)
    for message in messages:
        message |= of_messages
        for call in message.get("tool_calls", []):
            call |= of_calls
            call["function"] |= {"x": None}
    return messages


def test_what_is_ignored_or_null_is_left_out() -> None:
    assert messages_for_template(MESSAGES) == MESSAGES
    for value in ("x", None):
        own = changed(dict.fromkeys(IGNORED, value), dict.fromkeys(IGNORED_OF_CALLS, value))
        assert messages_for_template(own) == MESSAGES
    nothing: dict[str, Any] = {"audio": None, "function_call": None, "x": None}
    assert messages_for_template(changed(nothing, {"x": None})) == MESSAGES


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "developer"}, "content"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_what_says_nothing_here_is_refused(message: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as caught:
        messages_for_template([*MESSAGES, message])
    assert (caught.value.status, caught.value.param) == (400, f"messages[4].{place}")
