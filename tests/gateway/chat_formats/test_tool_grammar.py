"""Grammars of calls, held against texts by the library that targets use, byte by byte."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.reasoning import ReasoningParser, Thinking
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from ssd_gateway.chat_formats.tool_grammar import (
    CallableTool,
    answer_alone,
    calls_alone,
    calls_in_text,
    calls_or_answer,
    json_rule,
)
from tests.gateway.chat_formats.pieces import message_of

DAYS = {"type": "array", "items": {"type": "integer"}}
STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": DAYS},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    CallableTool("weather", STRICT),
    CallableTool("weather_now", {"type": "object"}),
    CallableTool("time", NOTHING),
]
GOOD = [
    ("weather", '{"city": "Zürich", "days": [1, 2]}'),
    ("weather_now", '{"any": [{"thing": null}, -1.5e3, "</tool_call>"]}'),
    ("time", "{}"),
]
BAD = [
    ("weather", '{"town"'),
    ("weather", "{}"),
    ("weather_now", "[]"),
    ("time", '{"a"'),
    ("hour", "{}"),
]


@dataclass
class Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id: int = 256
    bos_token_id: int | None = None
    tokens: list[bytes] = field(default_factory=lambda: [*(bytes([i]) for i in range(256)), b"END"])
    special_token_ids: tuple[int, ...] = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def verdict(grammar: str, text: str) -> str:
    """``whole``: a text may end so; ``begun``: it may go on; ``wrong``: none goes on so."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    if matcher.try_consume_tokens(list(data)) < len(data):
        return "wrong"
    return "whole" if matcher.is_accepting() else "begun"


def written(form: str, calls: list[tuple[str, str]]) -> str:
    this = TOOL_FORMATS[form]
    objects = [f'{{"name": "{name}", "{this.arguments}": {text}}}' for name, text in calls]
    return this.separator.join(f"{this.before}{each}{this.after}" for each in objects)


def read(form: str, text: str) -> list[tuple[str, str]]:
    calls = TOOL_FORMATS[form].parser({tool.name for tool in TOOLS})
    parser = ChatParser(ReasoningParser(Thinking.MAYBE), calls)
    return list(message_of(parser, [text])["calls"])


both = pytest.mark.parametrize("form", sorted(TOOL_FORMATS))


@both
@pytest.mark.parametrize("make", [calls_alone, calls_in_text])
def test_calls_follow_their_grammar(form: str, make: Callable[..., str]) -> None:
    this = TOOL_FORMATS[form]
    many, once = (make(this, TOOLS, parallel, Thinking.NEVER) for parallel in (True, False))
    for calls in (GOOD, *([each] for each in GOOD)):
        text = written(form, calls)
        assert verdict(many, text) == "whole"
        assert read(form, text) == calls
    assert verdict(once, written(form, GOOD[:1])) == "whole"
    assert verdict(once, written(form, GOOD[:2])) == "wrong"
    for call in BAD:
        for calls in ([call], [GOOD[0], call]):
            assert verdict(many, written(form, calls)) == "wrong"
    assert verdict(many, written(form, GOOD[:1]) + " Hi") == "wrong"


@both
def test_text_is_free_until_it_comes_to_a_call_unless_there_are_calls_alone(form: str) -> None:
    this = TOOL_FORMATS[form]
    alone, free = (make(this, TOOLS, True, Thinking.NEVER) for make in (calls_alone, calls_in_text))
    calls, trigger = written(form, GOOD), "" if form == "hermes" else this.trigger
    assert {verdict(alone, calls[:end]) for end in range(20)} == {"begun"}
    for text in ("Hi {1} é <tool>\n", f"So: {trigger}{calls}", "<think>"):
        assert (verdict(alone, text), verdict(free, text)) == ("wrong", "whole")
    assert verdict(free, "") == "whole"
    assert verdict(free, f"So: {this.trigger}") == "begun"
    assert verdict(free, f"So: {this.trigger}Hi") == "wrong"


ANSWER = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}


@both
def test_calls_or_an_answer_that_has_a_schema(form: str) -> None:
    grammar = calls_or_answer(TOOL_FORMATS[form], TOOLS, True, Thinking.NEVER, json_rule(ANSWER))
    answer = '{"sky": "blue"}'
    assert verdict(grammar, answer) == verdict(grammar, written(form, GOOD)) == "whole"
    assert verdict(grammar, "Hi") == verdict(grammar, '{"sky": "red') == "wrong"
    assert read(form, answer) == []  # it is text


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (json_rule(ANSWER), '{"sky": "grey"}', "grey"),
        (json_rule({}), "[1, null]", "so"),
        (r"/a\/[b\n]+/", "a/b\nb", "ab"),
        ('"a" | "b"', "b", "c"),
    ],
)
def test_an_answer_after_thoughts(rule: str, good: str, bad: str) -> None:
    inside, maybe = (answer_alone(each, rule) for each in (Thinking.INSIDE, Thinking.MAYBE))
    assert verdict(inside, f"Hm {{\n</think>\n\n{good}") == "whole"
    assert verdict(inside, f"Hm</think>{bad}") == "wrong"
    assert verdict(maybe, good) == verdict(maybe, f"<think>Hm</think>{good}") == "whole"
    assert verdict(maybe, bad) == "wrong"


def test_an_answer_of_llama_that_begins_with_an_object_is_a_call() -> None:
    grammar = calls_in_text(TOOL_FORMATS["llama3"], TOOLS, True, Thinking.NEVER)
    assert verdict(grammar, "{1}") == verdict(grammar, "\n {") == "wrong"


@both
@pytest.mark.parametrize("make", [calls_alone, calls_in_text])
def test_thoughts_come_first(form: str, make: Callable[..., str]) -> None:
    calls = written(form, GOOD)
    may, inside = (
        make(TOOL_FORMATS[form], TOOLS, True, each) for each in (Thinking.MAYBE, Thinking.INSIDE)
    )
    assert verdict(may, calls) == "whole"
    assert verdict(may, f"<think>\nHm {{é\n</think>\n\n{calls}") == "whole"
    assert verdict(inside, f"\nHm <tool_call> {{é\n</think>\n\n{calls}") == "whole"
    assert verdict(inside, calls) == "begun"
    if make is calls_alone:
        for text in ("<think></think><tool_call>x", "<think></think>{x"):
            assert verdict(may, text) == "wrong"
