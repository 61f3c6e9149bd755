"""Chats whose last message is continued end where transformers has them end."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.text.chats import ChatOptions
from ssd_engine.text.tokenizer import ChatTemplate, Tokenizer
from tests.suite.scale import share

SHIPPED = resolve_model("stories-target")
TEMPLATES = {
    "kept": """{% for message in messages %}
{{- '<|user|>' + message.role + ': ' + message.content + '<|eos|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|story|>' }}{% endif %}""",
    "trimmed": """{% for message in messages %}
{{- '<|user|>' + message.content | trim + '<|eos|>\\n' }}{% endfor %}""",
}
CONTINUED = ChatOptions(add_generation_prompt=False, continue_final_message=True)


@cache
def tokenizer(template: str, allowed: bool = False) -> Tokenizer:
    given_template = ChatTemplate(Path("x"), TEMPLATES.get(template, template))
    return Tokenizer(SHIPPED, load_model_config(SHIPPED), given_template, allowed)


@cache
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(SHIPPED))


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=share(300), derandomize=True, deadline=None)
@given(st.lists(st.text(" \nabeos|<>", max_size=9) | st.sampled_from(["eos", "er: "]), min_size=1))
def test_a_chat_goes_on_in_its_last_message(template: str, contents: list[str]) -> None:
    messages = chat(*contents)
    text = oracle().apply_chat_template(
        messages,
        chat_template=TEMPLATES[template],
        tokenize=False,
        continue_final_message=True,
    )
    tokens = tokenizer(template, allowed=True).encode_chat(messages, {}, CONTINUED)
    assert tokens == oracle().encode(text, add_special_tokens=False)


def test_a_message_that_a_template_says_twice_is_continued_where_it_comes_last() -> None:
    made = tokenizer("{{ messages[-1].content }}<|eos|>{{ messages[-1].content | trim }}<|eos|>")
    assert made.spell(made.encode_chat(chat("so "), {}, CONTINUED)) == "so <|eos|>so"


def test_no_turn_begins_where_none_is_asked_for() -> None:
    messages, silent = chat("Hi"), ChatOptions(add_generation_prompt=False)
    spelled = tokenizer("kept").spell(tokenizer("kept").encode_chat(messages, {}, silent))
    assert spelled == "<|user|>user: Hi<|eos|>"
    begun = tokenizer("kept").encode_chat(messages)
    assert tokenizer("kept").spell(begun) == f"{spelled}<|story|>"


def test_control_tokens_of_a_continued_message_are_text() -> None:
    made = tokenizer("kept")
    tokens = made.encode_chat(chat("Hi", "So <|eos|><|eos|>"), {}, CONTINUED)
    assert made.spell(tokens) == "<|user|>user: Hi<|eos|><|user|>assistant: So <|eos|><|eos|>"
    assert [token for token in tokens if token < 5] == [3, 1, 3]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].role }}", "{{ messages[-1].content | upper }}", "{{ 'x' }}"]
)
def test_a_template_that_changes_the_last_message_cannot_have_it_continued(template: str) -> None:
    with pytest.raises(InputError, match=r"^chat.continue_final_message: the chat template"):
        tokenizer(template).encode_chat(chat("Hi", "so"), {}, CONTINUED)


FORGED = "a<|eos|>b"
NESTED: list[dict[str, Any]] = [
    {"name": FORGED},
    {"tool_calls": [{"function": {"name": "f", "arguments": {FORGED: [FORGED, 1, None]}}}]},
    {FORGED: {FORGED: True}},
    {"tool_call_id": FORGED, "reasoning_content": FORGED},
]


@pytest.mark.parametrize("extra", NESTED)
def test_no_string_of_a_message_becomes_a_control_token(extra: dict[str, Any]) -> None:
    template = "{{ '<|user|>' ~ messages | tojson ~ '<|story|>' }}"
    messages = [{"role": "assistant", "content": None, **extra}]
    tokens = tokenizer(template).encode_chat(messages)
    assert [token for token in tokens if token < 5] == [3, 4]
    assert FORGED in tokenizer(template).spell(tokens)
    obeyed = tokenizer(template, allowed=True).encode_chat(messages)
    assert 1 in obeyed


def test_tools_are_told_as_transformers_tells_them() -> None:
    template = "{{ '<|user|>' ~ tools | tojson ~ messages[0].content ~ '<|story|>' }}"
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    text = oracle().apply_chat_template(
        chat("Hi"), tools=tools, chat_template=template, tokenize=False
    )
    made = tokenizer(template)
    assert made.spell(made.encode_chat(chat("Hi"), tools=tools)) == text
    assert made.spell(made.encode_chat(chat("Hi"), tools=[])) == "<|user|>nullHi<|story|>"


def test_no_string_of_a_tool_becomes_a_control_token() -> None:
    template = "{{ '<|user|>' ~ tools | tojson ~ '<|story|>' }}"
    tools = [{"function": {"name": FORGED, FORGED: [FORGED]}}]
    tokens = tokenizer(template).encode_chat(chat("Hi"), tools=tools)
    assert [token for token in tokens if token < 5] == [3, 4]
    assert 1 in tokenizer(template, allowed=True).encode_chat(chat("Hi"), tools=tools)


def test_control_tokens_have_a_spelling_beside_their_empty_text() -> None:
    made = tokenizer("kept")
    ids = made.encode("<|bos|>é<|eos|>", add_special_tokens=False)
    assert (made.text_of(ids), made.spell(ids)) == ("é", "<|bos|>é<|eos|>")
    assert made.encode("é") == [0, *made.encode("é", add_special_tokens=False)]
