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

MAYBE, INSIDE, NEVER = Thinking.MAYBE, Thinking.INSIDE, Thinking.NEVER


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (MAYBE, "<think>\nA hen?\n\nYes.\n</think>\n\nIt is.\n", "A hen?\n\nYes.", "It is.\n"),
        (MAYBE, "\n<think>a < b</think>c", "a < b", "c"),
        (MAYBE, "<think></think>\n\nc", "", "c"),
        (MAYBE, "<think>cut\n", "cut", ""),
        (MAYBE, "<think>cut</thi", "cut</thi", ""),
        (MAYBE, " No thoughts: <think>x</think>", "", " No thoughts: <think>x</think>"),
        (MAYBE, "<thin", "", "<thin"),
        (MAYBE, "", "", ""),
        (INSIDE, "\nSo.\n</think>\n\nYes</think>", "So.", "Yes</think>"),
        (INSIDE, "<think>\nSo.</think>Yes", "So.", "Yes"),
        (INSIDE, "never closed\n", "never closed", ""),
        (INSIDE, "</think>Yes", "", "Yes"),
        (NEVER, "<think>a</think>\n\nb", "", "<think>a</think>\n\nb"),
    ],
)
def test_thoughts_are_told_apart_from_the_answer(
    thinking: Thinking, text: str, reasoning: str, content: str
) -> None:
    message = message_however_cut(lambda: ChatParser(ReasoningParser(thinking), None), text)
    assert (message["reasoning"], message["content"]) == (reasoning, content)


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
