"""From a GenerateRequest to the JSON that asks a gateway for the same."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from secrets import randbits
from typing import Any

from google.protobuf import json_format

from ssd.v1 import target_pb2
from ssd_client.errors import BadInputError
from ssd_client.generate.request import SAMPLING
from ssd_client.generate.speculation import MODES, VERIFICATIONS

_GRAMMARS = {
    "json_schema": "json",
    "regex": "regex",
    "choices": "choice",
    "context_free": "grammar",
}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def path_of(request: target_pb2.GenerateRequest) -> str:
    return CHAT if request.HasField("chat") else COMPLETION


def body_of(request: target_pb2.GenerateRequest) -> dict[str, Any]:
    """Raises BadInputError for what HTTP has no field for."""
    sampling = request.sampling
    body: dict[str, Any] = {
        **_prompt(request),
        **{name: getattr(sampling, name) for name in SAMPLING if sampling.HasField(name)},
        "seed": sampling.seed if sampling.HasField("seed") else randbits(64),
        **_end(request),
        **_grammar(request.grammar),
        **_logprobs(request),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "return_token_origins": True,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if speculation := _speculation(request.speculation):
        body["speculation"] = speculation
    for name in ("request_id", "cache_salt"):
        if value := getattr(request, name):
            body[name] = value
    return body


def _prompt(request: target_pb2.GenerateRequest) -> dict[str, Any]:
    if request.HasField("chat"):
        messages = [{"role": each.role, "content": each.content} for each in request.chat.messages]
        kwargs = json_format.MessageToDict(request.chat.template_kwargs)
        return {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}
    if request.HasField("token_ids"):
        data = request.token_ids
        return {"prompt": list(struct.unpack(f"<{len(data) // 4}I", data))}
    return {"prompt": request.text}


def _end(request: target_pb2.GenerateRequest) -> dict[str, Any]:
    stop, found = request.stop, dict[str, Any]()
    if stop.HasField("max_tokens"):
        found["max_tokens"] = stop.max_tokens
    elif not request.HasField("chat"):
        raise BadInputError(
            "--max-tokens: name it with --url: by HTTP a continuation has 16 tokens otherwise"
        )
    if stop.strings:
        found["stop"] = list(stop.strings)
    if stop.token_ids:
        found["stop_token_ids"] = list(stop.token_ids)
    if stop.ignore_eos:
        found["ignore_eos"] = True
    if stop.min_tokens:
        found["min_tokens"] = stop.min_tokens
    return found


def _grammar(grammar: target_pb2.Grammar) -> dict[str, Any]:
    """By the names that vLLM has for them."""
    rule = grammar.WhichOneof("rule")
    if rule is None:
        return {}
    value = list(grammar.choices.texts) if rule == "choices" else getattr(grammar, rule)
    return {"structured_outputs": {_GRAMMARS[rule]: value}}


def _logprobs(request: target_pb2.GenerateRequest) -> dict[str, Any]:
    asked = request.logprobs
    if not asked.chosen:
        return {}
    if request.HasField("chat"):
        numbers: dict[str, Any] = {"logprobs": True, "top_logprobs": asked.top_n}
    else:
        numbers = {"logprobs": asked.top_n}
    return {**numbers, "return_tokens_as_token_ids": True}


def _speculation(options: target_pb2.SpeculationOptions) -> dict[str, Any]:
    if options.HasField("down_weight"):
        raise BadInputError("--down-weight: HTTP has no field for it, leave it out or use --target")
    names: dict[str, Mapping[str, int]] = {"mode": MODES, "verification": VERIFICATIONS}
    found: dict[str, Any] = {
        field: name
        for field, known in names.items()
        for name, value in known.items()
        if getattr(options, field) == value
    }
    if options.depth:
        found["depth"] = options.depth
    if options.endpoints:
        found["endpoints"] = list(options.endpoints)
    return found
