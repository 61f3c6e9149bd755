"""What a request does not name is the model's own: sampling options, end tokens, chat template."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.terminal.render import model_info_json
from ssd_engine.checkpoints.model_config import load_model_config
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
    named = {**DEFAULTS, "top_k": 1}
    greedy = generate(server, chat("A lamb."), **named)
    assert generate(server, chat("A lamb."), top_k=1).tokens == greedy.tokens


def test_the_target_tells_what_is_in_force(server: TargetProcess) -> None:
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=HANG_SECONDS)
    assert model_info_json(info)["sampling_defaults"] == DEFAULTS
    assert list(info.eos_token_ids) == [1, 300]
    assert "sampling defaults: temperature 0.6, top_k 20, top_p 0.9" in server.log()


def test_the_template_is_the_operators_and_knows_further_names(server: TargetProcess) -> None:
    lengths = [
        generate(server, chat("A lamb.", **names)).finish.usage.prompt_tokens
        for names in ({}, {"enable_thinking": False}, {"enable_thinking": True, "times": 4})
    ]
    assert lengths[0] == lengths[1] < lengths[2] - 4


def test_the_template_names_tools_and_tells_how_they_are_called(server: TargetProcess) -> None:
    stub = server.stub()
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=HANG_SECONDS)
    assert info.chat_format == pb.ChatFormat(tools="hermes")
    prompt = chat("A lamb.")
    prompt.tools_json = b'[{"function": {"name": "bleat"}}]'
    tokens = stub.Tokenize(pb.TokenizeRequest(chat=prompt), timeout=HANG_SECONDS).tokens
    assert b'A lamb. <tool_call>[{"function": {"name": "bleat"}}]<|story|>' in b"".join(tokens)
    told = generate(server, prompt).finish.usage.prompt_tokens
    assert told == len(tokens) > generate(server, chat("A lamb.")).finish.usage.prompt_tokens


@pytest.mark.parametrize("name", ["messages", "bos_token", "tokenize", "_hidden", "a b"])
def test_names_that_are_the_servers_own_are_refused(name: str, server: TargetProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(server, chat("A lamb.", **{name: 1}))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"chat.template_kwargs: {name!r} is no name" in caught.value.details()


def test_neutral_options_where_the_operator_wants_them(model: Path) -> None:
    """Texts differ then, so a request is not resumed from one such server on the other."""
    plans = [
        plan_target(TargetConfig(str(model), generation_config=each)).target
        for each in ("model", "none")
    ]
    assert plans[1].sampling.options()["top_k"] == 0
    assert plans[1].model.eos_token_ids == (1, 300)
    assert plans[0].fingerprint(plans[0].load_tokenizer()) != plans[1].fingerprint(
        plans[1].load_tokenizer()
    )


def test_names_for_the_template_are_bounded() -> None:
    directory = resolve_model("stories-target")
    config = load_model_config(directory)
    limits = RequestLimits(config.vocab_size, 512, 512, config.eos_token_ids)
    request = pb.GenerateRequest(chat=chat("x", long="y" * 20_000))
    with pytest.raises(InputError, match=r"^chat.template_kwargs: at most 16384 bytes"):
        parse_request(request, Tokenizer(directory, config), limits)
