"""Thoughts are told as such, however the text is cut."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.chat_reading import ChatReading
from ssd_gateway.chat_formats.reasoning import ReasoningParser, Thinking
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from tests.gateway.chat_formats.pieces import message_however_cut, message_of
from tests.suite.scale import share


def split(text: str, thinking: Thinking) -> tuple[str, str]:
    message = message_however_cut(lambda: ChatParser(ReasoningParser(thinking), None), text)
    return message["reasoning"], message["content"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nA hen?\n\nYes.\n</think>\n\nIt is.\n", ("A hen?\n\nYes.", "It is.\n")),
        ("\n<think>a < b</think>c", ("a < b", "c")),
        ("<think></think>\n\nc", ("", "c")),
        ("<think>cut\n", ("cut", "")),
        ("<think>cut</thi", ("cut</thi", "")),
        (" No thoughts: <think>x</think>", ("", " No thoughts: <think>x</think>")),
        ("<thin", ("", "<thin")),
        ("", ("", "")),
    ],
)
def test_answers_that_may_begin_with_thoughts(text: str, expected: tuple[str, str]) -> None:
    assert split(text, Thinking.MAYBE) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nSo.\n</think>\n\nYes</think>", ("So.", "Yes</think>")),
        ("<think>\nSo.</think>Yes", ("So.", "Yes")),
        ("never closed\n", ("never closed", "")),
        ("</think>Yes", ("", "Yes")),
    ],
)
def test_answers_that_begin_within_thoughts(text: str, expected: tuple[str, str]) -> None:
    assert split(text, Thinking.INSIDE) == expected


def test_without_thoughts_a_text_is_as_it_was() -> None:
    text = "<think>a</think>\n\nb"
    assert split(text, Thinking.NEVER) == ("", text)


def test_calls_follow_thoughts() -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    text = f"<think>\nI could {call} now.\n</think>\n\n{call}"
    reading = ChatReading(Thinking.MAYBE, tools=TOOL_FORMATS["hermes"], names={"time"})
    message = message_however_cut(lambda: reading.parser(""), text)
    assert message == {
        "reasoning": f"I could {call} now.",
        "content": "",
        "calls": [("time", "{}")],
    }


@pytest.mark.parametrize(
    ("prompt", "expected"), [("<|assistant|><think>\n", "a"), ("<think>\n\n</think>\n\n", "")]
)
def test_the_end_of_a_prompt_tells_where_an_answer_begins(prompt: str, expected: str) -> None:
    reading = ChatReading(Thinking.INSIDE, by_prompt=True)
    assert message_of(reading.parser(prompt), ["a</think>b"])["reasoning"] == expected


PARTS = ["<think>", "</think>", "<", "</", "\n", " ", "x", "think>", "é"]


@given(st.lists(st.sampled_from(PARTS), max_size=10), st.sampled_from(Thinking))
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_any_text_has_one_message(parts: list[str], thinking: Thinking) -> None:
    def message(pieces: list[str]) -> dict[str, Any]:
        return message_of(ChatParser(ReasoningParser(thinking), None), pieces)

    text = "".join(parts)
    assert message(parts) == message([text]) == message(list(text))
