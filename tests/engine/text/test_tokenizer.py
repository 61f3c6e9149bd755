"""Files that say all are read without transformers, and come to the same; others are left to it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError, ModelError
from ssd_engine.text.confined.renderers import ChatRenderers
from ssd_engine.text.plain_tokenizer import PlainTokenizer, load_plain
from ssd_engine.text.tokenizer import (
    Tokenizer,
    TransformersTokenizer,
    render_chat,
    token_bytes,
)
from tests.suite.scale import share

SHIPPED = resolve_model("stories-target")
TEXTS = [
    "",
    "Once upon a time",
    "<|bos|>a<|user|> b <|story|><|eos|>",
    "  two  spaces\n\n\ttab ",
    "Zoë said: 東京 🙂 naïve",
    "<|nothing|> </s>",
]
CHATS = [
    [("user", "Tell me a story.")],
    [("system", "Be brief."), ("user", " Hi & <b> \n"), ("assistant", "Hello."), ("user", "More?")],
]
TEMPLATES = {
    "headers": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "[system]\\n" + system_message + (pad_token or "") }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\\n\\n'+ message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
{%- endif %}
""",
    "blocks": """{% for message in messages %}
  {% if loop.first and message['role'] != 'system' %}
none of it
  {% endif %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}
{% if add_generation_prompt %}<assistant>
{% endif %}
""",
    "training": """{% for message in messages %}{% generation %}
  {{ message.content }}{% set inside = 1 %}
{% endgeneration %}{{ inside is defined }}{% endfor %}""",
    "names": """{%- set ns = namespace(last=-1, text='') -%}
{%- for message in messages[::-1] -%}
  {%- set index = (messages|length - 1) - loop.index0 -%}
  {%- if ns.last < 0 and message.role == "user" -%}{%- set ns.last = index -%}{%- endif -%}
  {%- if message.role == "assistant" -%}{%- continue -%}{%- endif -%}
  {%- set ns.text = ns.text + message.content -%}
{%- endfor -%}
{{ ns.last }} {{ ns.text }} {{ messages | tojson }} {{ dict(a=1) | tojson(indent=2) }}
{%- if tools is none and documents is none and not unk_token is defined %} bare {% endif -%}
""",
}


def copy_with(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The shipped tokenizer with other settings, or another file."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    files = [folder / name for name in ("tokenizer_config.json", "tokenizer.json")]
    contents = [json.loads(file.read_text()) for file in files]
    change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
    return folder


def both(directory: Path) -> tuple[PlainTokenizer, TransformersTokenizer]:
    plain = load_plain(directory)
    assert plain is not None
    return plain, TransformersTokenizer(directory, generic=True)


def assert_equal(directory: Path) -> None:
    plain, other = both(directory)
    oracle = PreTrainedTokenizerFast.from_pretrained(str(directory))
    assert plain.vocabulary() == other.vocabulary()
    assert token_bytes(plain, 4096) == token_bytes(other, 4096)
    assert sorted(plain.special_ids) == sorted(other.special_ids)
    assert json.loads(plain.serialized()) == json.loads(other.serialized())
    for text in TEXTS:
        for special in (False, True):
            assert plain.encode(text, special) == other.encode(text, special)
    assert plain.chat_template == other.chat_template
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        for prompted in (False, True):
            text = oracle.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompted
            )
            assert render_chat(plain, messages, prompted) == text
            assert render_chat(other, messages, prompted) == text


def test_the_shipped_tokenizer_is_read_without_transformers_and_is_the_same() -> None:
    assert_equal(SHIPPED)


@cache
def shipped() -> tuple[PlainTokenizer, TransformersTokenizer]:
    return both(SHIPPED)


@settings(max_examples=share(2000), derandomize=True, deadline=None)
@given(st.text(max_size=60))
def test_any_text_has_the_same_tokens(text: str) -> None:
    plain, other = shipped()
    tokens = plain.encode(text)
    assert tokens == other.encode(text)
    assert plain.decode(tokens) == other.decode(tokens)


@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_rendered_as_transformers_does(template: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: dict[str, Any]) -> None:
        config["chat_template"] = TEMPLATES[template]

    assert_equal(copy_with(tmp_path, change))


def test_a_template_in_a_file_comes_first(tmp_path: Path) -> None:
    directory = copy_with(tmp_path, lambda config, _: None)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert_equal(directory)
    assert Tokenizer(directory, load_model_config(SHIPPED)).has_chat_template


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: dict[str, Any]) -> None:
        config["chat_template"] = [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {
                "name": "tool_use",
                "template": "{{ tools | tojson }}<tool_call>{{ messages[0].content }}",
            },
        ]

    directory = copy_with(tmp_path, change)
    oracle = PreTrainedTokenizerFast.from_pretrained(str(directory))
    tokenizer = Tokenizer(directory, load_model_config(SHIPPED))
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for with_tools in (None, tools):
        expected = oracle.apply_chat_template(messages, tokenize=False, tools=with_tools)
        assert tokenizer.spell(tokenizer.encode_chat(messages, tools=with_tools)) == expected
    assert "<tool_call>" in tokenizer.tool_template
    assert "<tool_call>" not in tokenizer.chat_template


def test_settings_that_list_the_added_tokens_once_more_are_understood(tmp_path: Path) -> None:
    def change(config: dict[str, Any], file: dict[str, Any]) -> None:
        config["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in file["added_tokens"]
        }
        config["model_input_names"] = ["input_ids", "attention_mask"]
        config["clean_up_tokenization_spaces"] = True

    directory = copy_with(tmp_path, change)
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<|user|>"}')
    assert_equal(directory)


def an_unknown_setting(config: dict[str, Any], file: dict[str, Any]) -> None:
    config["split_special_tokens"] = True


def a_token_to_be_added(config: dict[str, Any], file: dict[str, Any]) -> None:
    config["eos_token"] = "<|over|>"


def a_token_that_differs(config: dict[str, Any], file: dict[str, Any]) -> None:
    config["added_tokens_decoder"] = {
        "0": {
            "content": "<|bos|>",
            "lstrip": True,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
    }


def a_token_with_its_own_rules(config: dict[str, Any], file: dict[str, Any]) -> None:
    config["bos_token"] = {"__type": "AddedToken", "content": "<|bos|>", "lstrip": True}


def several_templates(config: dict[str, Any], file: dict[str, Any]) -> None:
    config["chat_template"] = [{"name": "default", "template": "{{ messages[0].content }}"}]


def texts_that_are_cut(config: dict[str, Any], file: dict[str, Any]) -> None:
    file["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }


def no_way_to_end(config: dict[str, Any], file: dict[str, Any]) -> None:
    file["post_processor"] = None


@pytest.mark.parametrize(
    "change",
    [
        an_unknown_setting,
        a_token_to_be_added,
        a_token_that_differs,
        a_token_with_its_own_rules,
        several_templates,
        texts_that_are_cut,
        no_way_to_end,
    ],
)
def test_what_is_not_known_is_left_to_transformers(
    change: Callable[[dict[str, Any], dict[str, Any]], None], tmp_path: Path
) -> None:
    directory = copy_with(tmp_path, change)
    assert load_plain(directory) is None
    config = replace(load_model_config(SHIPPED), vocab_size=4200)
    tokenizer = Tokenizer(directory, config)
    theirs = TransformersTokenizer(directory, generic=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._hidden = 1 %}",
        "{{ raise_exception('not with me') }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    def change(config: dict[str, Any], _: dict[str, Any]) -> None:
        config["chat_template"] = template

    directory = copy_with(tmp_path, change)
    assert load_plain(directory) is not None
    tokenizer = Tokenizer(directory, load_model_config(SHIPPED))
    with pytest.raises(InputError, match="the chat template refused"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def chat_with(template: str, folder: Path) -> Tokenizer:
    def change(config: dict[str, Any], _: dict[str, Any]) -> None:
        config["chat_template"] = template

    return Tokenizer(copy_with(folder, change), load_model_config(SHIPPED))


ENDLESS = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**12 }}",
    "a text that doubles": "{% set a = 'a' %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "a list that doubles": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
}


@pytest.fixture
def hasty_renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates have one second instead of two."""
    with closing(ChatRenderers(seconds=1)) as hasty:
        monkeypatch.setattr("ssd_engine.text.tokenizer.RENDERERS", hasty)
        yield


@pytest.mark.usefixtures("hasty_renderer")
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_stopped_and_the_next_chat_is_served(
    template: str, tmp_path: Path
) -> None:
    tokenizer = chat_with(
        "{% if messages[0].content == 'x' %}" + template + "{% endif %}", tmp_path
    )
    with pytest.raises(ModelError, match="cannot be used: it took more than"):
        tokenizer.check_template()
    with pytest.raises(InputError, match="the chat template refused: it took more than"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert tokenizer.encode_chat([{"role": "user", "content": "y"}]) == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 17000000 }}", "it makes more than 16 MiB"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_goes_too_far_is_refused(template: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        chat_with(template, tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_a_chat_that_has_no_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_with("{{ '\\ud800' }}", tmp_path)
    with pytest.raises(InputError, match="the tokenizer failed"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
