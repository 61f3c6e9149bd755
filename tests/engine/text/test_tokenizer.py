"""Files that say all are read without transformers, and come to the same; others are left to it."""

import json
import shutil
from collections.abc import Iterator, Mapping
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
from ssd_engine.text import tokenizer as tokenizer_module
from ssd_engine.text.chats import ChatOptions
from ssd_engine.text.confined.process import ConfinedProcess
from ssd_engine.text.confined.renderers import ChatRenderers
from ssd_engine.text.plain_tokenizer import PlainTokenizer, load_plain
from ssd_engine.text.tokenizer import (
    ChatTemplate,
    Tokenizer,
    TransformersTokenizer,
    render_chat,
    token_bytes,
)
from tests.suite.scale import full_only, share

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


def copy_with(
    folder: Path, config: Mapping[str, Any] | None = None, file: Mapping[str, Any] | None = None
) -> Path:
    """The shipped tokenizer with other settings, or another file."""
    shutil.copy(SHIPPED / "config.json", folder)
    for name, changes in (("tokenizer_config.json", config), ("tokenizer.json", file)):
        content = json.loads((SHIPPED / name).read_text())
        (folder / name).write_text(json.dumps({**content, **(changes or {})}))
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
    assert_equal(copy_with(tmp_path, {"chat_template": TEMPLATES[template]}))


def test_a_tokenizer_is_tried_out_once_and_a_shipped_one_need_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    class Watched(ConfinedProcess):
        def ask(self, question: Mapping[str, Any]) -> str:
            tried.append(question["file"])
            return super().ask(question)

    monkeypatch.setattr(tokenizer_module, "ConfinedProcess", Watched)
    monkeypatch.setattr(tokenizer_module, "PASSED", set())
    shipped = resolve_model("stories-target")
    config = load_model_config(shipped)
    copies = [shutil.copytree(shipped, tmp_path / name) for name in "ab"]
    file = copies[1] / "tokenizer.json"
    for directory in (shipped, *copies):
        Tokenizer(directory, config)
    file.write_text(file.read_text() + " ")
    Tokenizer(copies[1], config)
    assert tried == [str(copies[0] / "tokenizer.json"), str(file)]


def test_a_template_in_a_file_comes_first(tmp_path: Path) -> None:
    directory = copy_with(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert_equal(directory)


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    said = "{{ messages[0].content }}"
    named = {"default": said, "tool_use": "{{ tools | tojson }}<tool_call>" + said}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    directory = copy_with(tmp_path, {"chat_template": listed})
    oracle = PreTrainedTokenizerFast.from_pretrained(str(directory))
    tokenizer = Tokenizer(directory, load_model_config(SHIPPED))
    messages = [{"role": "user", "content": "Hi"}]
    for with_tools in (None, [{"type": "function", "function": {"name": "é"}}]):
        expected = oracle.apply_chat_template(messages, tokenize=False, tools=with_tools)
        assert tokenizer.spell(tokenizer.encode_chat(messages, tools=with_tools)) == expected
    assert tokenizer.encode_chat(messages, tools=[]) == tokenizer.encode_chat(messages)
    assert (tokenizer.tool_template, tokenizer.chat_template) == (named["tool_use"], said)


def test_settings_that_list_the_added_tokens_once_more_are_understood(tmp_path: Path) -> None:
    added = json.loads((SHIPPED / "tokenizer.json").read_text())["added_tokens"]
    settings = {
        "added_tokens_decoder": {str(token.pop("id")): token for token in added},
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": True,
    }
    directory = copy_with(tmp_path, settings)
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<|user|>"}')
    assert_equal(directory)


BOS = {"content": "<|bos|>", "lstrip": True, "rstrip": False, "normalized": False}
DIFFERS = {"0": {**BOS, "single_word": False, "special": True}}
CUT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
DEFAULT = [{"name": "default", "template": "{{ messages[0].content }}"}]


@pytest.mark.parametrize(
    ("config", "file"),
    [
        pytest.param({"split_special_tokens": True}, {}, id="an unknown setting"),
        pytest.param({"eos_token": "<|over|>"}, {}, id="a token to be added"),
        pytest.param({"added_tokens_decoder": DIFFERS}, {}, id="a token that differs"),
        pytest.param({"bos_token": {"__type": "AddedToken", **BOS}}, {}, id="its own rules"),
        pytest.param({"chat_template": DEFAULT}, {}, id="several templates"),
        pytest.param({}, {"truncation": CUT}, id="texts that are cut"),
        pytest.param({}, {"post_processor": None}, id="no way to end"),
    ],
)
def test_what_is_not_known_is_left_to_transformers(
    config: dict[str, Any], file: dict[str, Any], tmp_path: Path
) -> None:
    directory = copy_with(tmp_path, config, file)
    assert load_plain(directory) is None
    tokenizer = Tokenizer(directory, replace(load_model_config(SHIPPED), vocab_size=4200))
    theirs = TransformersTokenizer(directory, generic=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)


SANDBOX = "the chat template refused"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages.append(1) }}", SANDBOX),
        ("{{ ''.__class__.__mro__ }}", SANDBOX),
        ("{% set ns = namespace(__class__=1) %}", SANDBOX),
        ("{% set ns = namespace() %}{% set ns._hidden = 1 %}", SANDBOX),
        ("{{ raise_exception('not with me') }}", SANDBOX),
        ("{{ cycler.__init__.__globals__ }}", SANDBOX),
        ("{{ 'a' * 17000000 }}", "it makes more than 16 MiB"),
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ '\\ud800' }}", "the tokenizer failed"),
    ],
)
def test_a_template_that_leaves_its_sandbox_or_goes_too_far_is_refused(
    template: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        tokenizer(template).encode_chat(chat("x"))


ENDLESS = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**12 }}",
    "a text that doubles": "{% set a = 'a' %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "a list that doubles": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
}


@pytest.fixture
def hasty_renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates have one second instead of two, and a quarter of the memory."""
    with closing(ChatRenderers(256 << 20, seconds=1)) as hasty:
        monkeypatch.setattr("ssd_engine.text.tokenizer.RENDERERS", hasty)
        yield


@pytest.mark.usefixtures("hasty_renderer")
@pytest.mark.parametrize(
    "template",
    [each if "doubles" not in name else full_only(each) for name, each in ENDLESS.items()],
    ids=ENDLESS,
)
def test_a_template_without_an_end_is_stopped_and_the_next_chat_is_served(template: str) -> None:
    only_x = "{% if messages[0].content == 'x' %}" + template + "{% endif %}"
    made = tokenizer(only_x)
    with pytest.raises(InputError, match="the chat template refused: it took more than"):
        made.encode_chat(chat("x"))
    assert made.encode_chat(chat("y")) == []
    if template == ENDLESS["a long text"]:
        with pytest.raises(ModelError, match="cannot be used: it took more than"):
            made.check_template()


# Chats whose last message is continued end where transformers has them end.

CONTINUED_IN = {
    "kept": """{% for message in messages %}
{{- '<|user|>' + message.role + ': ' + message.content + '<|eos|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|story|>' }}{% endif %}""",
    "trimmed": """{% for message in messages %}
{{- '<|user|>' + message.content | trim + '<|eos|>\\n' }}{% endfor %}""",
}
CONTINUED = ChatOptions(add_generation_prompt=False, continue_final_message=True)


@cache
def tokenizer(template: str, allowed: bool = False) -> Tokenizer:
    given_template = ChatTemplate(Path("x"), CONTINUED_IN.get(template, template))
    return Tokenizer(SHIPPED, load_model_config(SHIPPED), given_template, allowed)


@cache
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(SHIPPED))


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("template", CONTINUED_IN)
@settings(max_examples=share(300), derandomize=True, deadline=None)
@given(st.lists(st.text(" \nabeos|<>", max_size=9) | st.sampled_from(["eos", "er: "]), min_size=1))
def test_a_chat_goes_on_in_its_last_message(template: str, contents: list[str]) -> None:
    messages = chat(*contents)
    text = oracle().apply_chat_template(
        messages,
        chat_template=CONTINUED_IN[template],
        tokenize=False,
        continue_final_message=True,
    )
    tokens = tokenizer(template, allowed=True).encode_chat(messages, {}, CONTINUED)
    assert tokens == oracle().encode(text, add_special_tokens=False)


def test_a_message_that_a_template_says_twice_is_continued_where_it_comes_last() -> None:
    made = tokenizer("{{ messages[-1].content }}<|eos|>{{ messages[-1].content | trim }}<|eos|>")
    assert made.spell(made.encode_chat(chat("so "), {}, CONTINUED)) == "so <|eos|>so"


def test_no_turn_begins_where_none_is_asked_for() -> None:
    made, silent = tokenizer("kept"), ChatOptions(add_generation_prompt=False)
    asked, unasked = made.encode_chat(chat("Hi")), made.encode_chat(chat("Hi"), {}, silent)
    assert made.spell(unasked) == "<|user|>user: Hi<|eos|>"
    assert made.spell(asked) == "<|user|>user: Hi<|eos|><|story|>"


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
CALLS = [{"function": {"name": "f", "arguments": {FORGED: [FORGED, 1, None]}}}]
NESTED = "{{ '<|user|>' ~ [messages, tools, tone] | tojson ~ '<|story|>' }}"


@pytest.mark.parametrize(
    ("of_message", "names", "tools"),
    [
        ({"name": FORGED}, {}, None),
        ({"tool_calls": CALLS}, {}, None),
        ({FORGED: {FORGED: True}}, {}, None),
        ({"tool_call_id": FORGED, "reasoning_content": FORGED}, {}, None),
        ({}, {"tone": FORGED}, None),
        ({}, {"tone": {FORGED: ["a", FORGED, 1]}}, None),
        ({}, {}, [{"function": {"name": FORGED, FORGED: [FORGED]}}]),
    ],
)
def test_no_string_of_a_message_becomes_a_control_token(
    of_message: dict[str, Any], names: dict[str, Any], tools: list[dict[str, Any]] | None
) -> None:
    """Nor does one of a tool, or of a name for the template."""
    messages = [{"role": "assistant", "content": None, **of_message}]
    tokens = tokenizer(NESTED).encode_chat(messages, {"tone": "", **names}, tools=tools)
    assert [token for token in tokens if token < 5] == [3, 4]
    assert FORGED in tokenizer(NESTED).spell(tokens)
    obeyed = tokenizer(NESTED, allowed=True)
    assert 1 in obeyed.encode_chat(messages, {"tone": "", **names}, tools=tools)


def test_control_tokens_have_a_spelling_beside_their_empty_text() -> None:
    made = tokenizer("kept")
    ids = made.encode("<|bos|>é<|eos|>", add_special_tokens=False)
    assert (made.text_of(ids), made.spell(ids)) == ("é", "<|bos|>é<|eos|>")
    assert made.encode("é") == [0, *made.encode("é", add_special_tokens=False)]
