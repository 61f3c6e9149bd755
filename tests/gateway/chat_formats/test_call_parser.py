"""Calls in both formats: the same message however the text is cut, and nothing is lost."""

import json
from collections.abc import Callable
from itertools import pairwise

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


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def bare(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


BOTH = [("weather", ARGUMENTS), ("time", "{}")]
FIRST, SECOND = (tagged(*each) for each in BOTH)
OBJECTS = [bare(*each) for each in BOTH]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"Let me see.\n{FIRST}\n{SECOND}\n", "Let me see.\n", BOTH),
        ("llama3", "; ".join(OBJECTS), "", BOTH),
        ("llama3", "\n" + ";".join(OBJECTS), "", BOTH),
        ("llama3", "<|python_tag|>" + "\n".join(OBJECTS), "", BOTH),
        ("llama3", "<|python_tag|> " + "; ".join(OBJECTS), "", BOTH),
        ("llama3", f"So: {{1}}. <|python_tag|>{OBJECTS[0]}", "So: {1}.", BOTH[:1]),
        # Keys in any order.
        (
            "hermes",
            '<tool_call>{ "id" : 7, "arguments":{"a": 1} ,"type":"function", "name" :"time"}',
            "",
            [("time", '{"a": 1}')],
        ),
        (
            "llama3",
            '{"type": "function", "name": "time", "parameters": { }}',
            "",
            [("time", "{ }")],
        ),
        # Text around calls is kept.
        (
            "hermes",
            f"a{FIRST}\n b <tool_call>no</tool_call>{SECOND}c",
            "a\n b <tool_call>no</tool_call>c",
            BOTH,
        ),
        ("llama3", f"{OBJECTS[0]}; so", "so", BOTH[:1]),
        # Arguments that break end there.
        ("hermes", tagged("time", '{"a": tru}'), "}}\n</tool_call>", [("time", '{"a": tru')]),
        ("hermes", tagged("time", '{"a": 01}'), "}}\n</tool_call>", [("time", '{"a": 01')]),
        ("hermes", tagged("time", '{"a": "\\x"}'), 'x"}}\n</tool_call>', [("time", '{"a": "\\')]),
        (
            "hermes",
            tagged("time", '{"a": 1,}, "b": 2}'),
            '}, "b": 2}}\n</tool_call>',
            [("time", '{"a": 1,')],
        ),
    ],
)
def test_what_is_a_call_is_told_however_it_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    message = message_however_cut(parser_of(form), text)
    assert (message["content"].strip(), message["calls"]) == (content.strip(), calls)
    assert message["reasoning"] == ""


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
    '<tool_call>\n{"name": "' + "x" * 1100,
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
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_what_is_no_call_is_content(text: str, form: str) -> None:
    message = message_however_cut(parser_of(form), text)
    assert message == {"reasoning": "", "content": text, "calls": []}


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
