"""Calls in both formats: the same message however the text is cut, and nothing is lost."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.reasoning import ReasoningParser, Thinking
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from tests.gateway.chat_formats.pieces import message_however_cut, message_of, pushed
from tests.suite.scale import share

NAMES = {"weather", "time"}
ARGUMENTS = '{"city": "Zürich \\"HB\\" <tool_call> {", "n": [1, -2.5e3, true, null, {"a": {}}]}'


def parser_of(name: str) -> Callable[[], ChatParser]:
    form = TOOL_FORMATS[name]
    return lambda: ChatParser(ReasoningParser(Thinking.NEVER), form.parser(NAMES))


def hermes(text: str) -> dict[str, Any]:
    return message_however_cut(parser_of("hermes"), text)


def llama3(text: str) -> dict[str, Any]:
    return message_however_cut(parser_of("llama3"), text)


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def bare(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


BOTH = [("weather", ARGUMENTS), ("time", "{}")]


def test_two_calls_of_hermes_after_content() -> None:
    text = "Let me see.\n" + "\n".join(tagged(*each) for each in BOTH) + "\n"
    assert hermes(text) == {"reasoning": "", "content": "Let me see.\n", "calls": BOTH}


@pytest.mark.parametrize("lead", ["", "\n", "<|python_tag|>", "<|python_tag|> "])
@pytest.mark.parametrize("separator", ["; ", ";", "\n"])
def test_two_calls_of_llama(lead: str, separator: str) -> None:
    message = llama3(lead + separator.join(bare(*each) for each in BOTH))
    assert (message["content"].strip(), message["calls"]) == ("", BOTH)


def test_content_before_the_tag_of_llama_stays() -> None:
    message = llama3("So: {1}. <|python_tag|>" + bare(*BOTH[0]))
    assert (message["content"], message["calls"]) == ("So: {1}. ", BOTH[:1])


def test_keys_in_any_order() -> None:
    text = '<tool_call>{ "id" : 7, "arguments":{"a": 1} ,"type":"function", "name" :"time"}'
    assert hermes(text)["calls"] == [("time", '{"a": 1}')]
    assert llama3('{"type": "function", "name": "time", "parameters": { }}')["calls"] == [
        ("time", "{ }")
    ]


NO_CALLS = [
    "",
    "Just text, a < b, <tool>, <tool_cal",
    "<tool_call>",
    "<tool_call>\nweather in Paris\n</tool_call>",
    '<tool_call>\n{"name": "weather"}\n</tool_call>',
    '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": "{}"}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": [1]}',
    '<tool_call>\n{"name": weather, "arguments": {}}',
    '<tool_call>\n{"name": "weather", "colour": 1, "arguments": {}}',
    '<tool_call>\n{"name": "weather", "argu',
    '<tool_call>\n{"arguments": {"a": 1}, "name": "rm"}\n</tool_call>',
    '<tool_call>\n{"name": "' + "x" * 2000,
    '{"answer": {"name": "weather", "parameters": {}}}',
    '{"name": "weather", "name": "time"}',
    '{"name": "weather"',
    "{1: 2}",
    "  {",
    "<|python_tag|>print(1)",
    "<|python_tag|>",
    'I write {"name": "weather", "parameters": {}} as an example',
]


@pytest.mark.parametrize("text", NO_CALLS)
@pytest.mark.parametrize("read", [hermes, llama3])
def test_what_is_no_call_is_content(text: str, read: Callable[[str], dict[str, Any]]) -> None:
    assert read(text) == {"reasoning": "", "content": text, "calls": []}


def test_text_around_calls_is_kept() -> None:
    first, second = tagged(*BOTH[0]), tagged(*BOTH[1])
    assert hermes(f"a{first}\n b <tool_call>no</tool_call>{second}c") == {
        "reasoning": "",
        "content": "a\n b <tool_call>no</tool_call>c",
        "calls": BOTH,
    }
    assert llama3(bare(*BOTH[0]) + "; so")["content"] == " so"


@pytest.mark.parametrize(
    ("broken", "arguments", "rest"),
    [
        ('{"a": 1,}, "b": 2}', '{"a": 1,', '}, "b": 2}}\n</tool_call>'),
        ('{"a": tru}', '{"a": tru', "}}\n</tool_call>"),
        ('{"a": 01}', '{"a": 01', "}}\n</tool_call>"),
        ('{"a": "\\x"}', '{"a": "\\', 'x"}}\n</tool_call>'),
    ],
)
def test_arguments_that_break_end_there(broken: str, arguments: str, rest: str) -> None:
    message = hermes(tagged("time", broken))
    assert message == {"reasoning": "", "content": rest, "calls": [("time", arguments)]}


def test_a_call_that_is_cut_keeps_what_is_there() -> None:
    text = tagged("weather", ARGUMENTS)
    begin = text.index(ARGUMENTS)
    for end in range(begin + 1, begin + len(ARGUMENTS) + 1):
        parser = parser_of("hermes")()
        message = message_of(parser, [text[:end]])
        assert message["calls"] == [("weather", text[begin:end])]
        assert (message["content"], parser.is_calling, parser.has_called) == ("", True, True)


def test_names_come_before_arguments_are_complete() -> None:
    parser = parser_of("hermes")()
    told = pushed(parser, '<tool_call>\n{"name": "weather", "arguments": {"ci')
    assert [(call.name, call.arguments) for call in told.calls] == [("weather", '{"ci')]
    assert [call.arguments for call in pushed(parser, 'ty": "').calls] == ['ty": "']


FINITE = st.floats(allow_nan=False, allow_infinity=False)  # JSON has no others
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(sorted(NAMES)),
        st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3).map(
            lambda value: json.dumps(value, ensure_ascii=False)
        ),
    ),
    min_size=1,
    max_size=3,
)


def pieces_of(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


@given(CALLS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_any_arguments_are_told_exactly(
    calls: list[tuple[str, str]], places: list[int], is_hermes: bool
) -> None:
    written = [tagged(*call) if is_hermes else bare(*call) for call in calls]
    text = ("\n" if is_hermes else "; ").join(written)
    parser = parser_of("hermes" if is_hermes else "llama3")()
    message = message_of(parser, pieces_of(text, places))
    assert message == {"reasoning": "", "content": "", "calls": calls}


PARTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "time", ', '"arguments": {',
         '"a": 1', "}", "\n", ";", " ", "é", "<", '"', "weather", ":"]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.lists(st.integers(0, 999)))
@settings(max_examples=share(4000), derandomize=True, deadline=None)
def test_any_text_has_one_message(text: str, places: list[int]) -> None:
    for name in TOOL_FORMATS:
        whole = message_of(parser_of(name)(), [text])
        assert message_of(parser_of(name)(), list(text)) == whole
        assert message_of(parser_of(name)(), pieces_of(text, places)) == whole
        if not whole["calls"]:
            assert whole["content"] == text
