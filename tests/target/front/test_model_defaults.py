"""What a request does not name is the model's own: sampling options, end tokens, chat template."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.terminal.render import model_info_json
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.config import TargetConfig
from ssd_target.front.requests import RequestLimits, parse_request
from ssd_target.front.server import plan_target
from tests.processes import Output, TargetProcess, collect, target
from tests.waiting import HANG_SECONDS

DEFAULTS: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
}
TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}{{- '<|user|>' + message['content'] -}}{%- endfor -%}
{%- if enable_thinking is defined and enable_thinking -%}{{- ' Think.' * times -}}{%- endif -%}
{%- if tools -%}{{- ' <tool_call>' + (tools | tojson) -}}{%- endif -%}
{{- '<|story|>' -}}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with defaults of its own, and two end tokens."""
    folder = tmp_path_factory.mktemp("models") / "with-defaults"
    shutil.copytree(resolve_model("stories-target"), folder)
    content = {**DEFAULTS, "eos_token_id": [1, 300], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(
    model: Path, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TargetProcess]:
    flags = ("--chat-template", str(template))
    with target(tmp_path_factory.mktemp("target"), *flags, model=str(model)) as process:
        yield process


def chat(content: str, **names: Any) -> pb.ChatPrompt:
    prompt = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=content)])
    if names:
        prompt.template_kwargs.update(names)
    return prompt


def generate(server: TargetProcess, prompt: pb.ChatPrompt, **sampling: Any) -> Output:
    request = pb.GenerateRequest(chat=prompt, sampling=pb.SamplingOptions(seed=9, **sampling))
    request.stop.max_tokens = 30
    return collect(server.stub().Generate(request, timeout=HANG_SECONDS))


def test_a_request_that_names_nothing_has_the_models_options(server: TargetProcess) -> None:
    unnamed = generate(server, chat("A lamb."))
    assert unnamed.tokens == generate(server, chat("A lamb."), **DEFAULTS).tokens
    neutral = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert unnamed.tokens != generate(server, chat("A lamb."), **neutral).tokens


def test_what_is_named_comes_before_them(server: TargetProcess) -> None:
    greedy = generate(server, chat("A lamb."), **{**DEFAULTS, "top_k": 1})
    assert generate(server, chat("A lamb."), top_k=1).tokens == greedy.tokens


def test_the_target_tells_what_is_in_force(server: TargetProcess) -> None:
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=HANG_SECONDS)
    assert model_info_json(info)["sampling_defaults"] == DEFAULTS
    assert list(info.eos_token_ids) == [1, 300]
    assert (info.dtype, info.max_model_len, info.has_chat_template) == ("float32", 2048, True)
    assert info.chat_format == pb.ChatFormat(tools="hermes")
    assert "sampling defaults: temperature 0.6, top_k 20, top_p 0.9" in server.log()


def test_the_template_is_the_operators_and_knows_tools_and_further_names(
    server: TargetProcess,
) -> None:
    tools = chat("A lamb.")
    tools.tools_json = b'[{"function": {"name": "bleat"}}]'
    for prompt, expected in (
        (chat("A lamb."), b"A lamb.<|story|>"),
        (chat("A lamb.", enable_thinking=False), b"A lamb.<|story|>"),
        (chat("A lamb.", enable_thinking=True, times=2), b"A lamb. Think. Think.<|story|>"),
        (tools, b'A lamb. <tool_call>[{"function": {"name": "bleat"}}]<|story|>'),
    ):
        request = pb.TokenizeRequest(chat=prompt)
        tokens = server.stub().Tokenize(request, timeout=HANG_SECONDS).tokens
        assert b"".join(tokens) == b"<|bos|><|user|>" + expected
        assert generate(server, prompt).finish.usage.prompt_tokens == len(tokens)


def test_neutral_options_where_the_operator_wants_them(model: Path) -> None:
    """Texts differ then, so a request is not resumed from one such server on the other."""
    own, neutral = (
        plan_target(TargetConfig(str(model), generation_config=each)).target
        for each in ("model", "none")
    )
    assert neutral.sampling.options()["top_k"] == 0
    assert neutral.model.eos_token_ids == (1, 300)
    assert own.fingerprint(own.load_tokenizer()) != neutral.fingerprint(neutral.load_tokenizer())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, 1, f"'{name}' is no name") for name in ("messages", "bos_token", "tokenize")),
        *((name, 1, f"'{name}' is no name") for name in ("_hidden", "a b")),
        ("long", "y" * 20_000, "at most 16384 bytes"),
    ],
)
def test_names_for_the_template_are_bounded_and_none_of_the_servers_own(
    name: str, value: Any, words: str, tokenizer: Tokenizer
) -> None:
    limits = RequestLimits(4096, 512, 512, (1,))
    request = pb.GenerateRequest(chat=chat("A lamb.", **{name: value}))
    with pytest.raises(InputError, match=rf"^chat.template_kwargs: {words}"):
        parse_request(request, tokenizer, limits)
