"""From what a user asked for to a GenerateRequest. Pure: no input, no output.

Only what was set goes on the wire; for the rest the server's defaults hold.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssd.v1 import target_pb2
from ssd_client.errors import BadInputError
from ssd_client.generate.speculation import MODES, VERIFICATIONS

SAMPLING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class ChatPrompt:
    """Messages as (role, content)."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True)
class GenerateOptions:
    """Everything about a request but its prompt; None leaves it to the server."""

    request_id: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_id: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    mode: str | None = None
    draft: Sequence[str] = ()  # speculation endpoints, HOST:PORT
    depth: int | None = None
    verification: str | None = None
    down_weight: float | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None


def build_request(prompt: Prompt, options: GenerateOptions) -> target_pb2.GenerateRequest:
    """Raises BadInputError where a value cannot be sent; the server judges the rest."""
    request = target_pb2.GenerateRequest(
        request_id=options.request_id or "", cache_salt=options.cache_salt or ""
    )
    _set_prompt(request, prompt)
    if options.chat_template_kwargs is not None:
        if not isinstance(prompt, ChatPrompt):
            raise BadInputError("--chat-template-kwargs needs --chat")
        request.chat.template_kwargs.update(options.chat_template_kwargs)
    _set_sampling(request, options)
    _set_stop(request, options)
    _set_speculation(request, options)
    if options.logprobs or options.top_logprobs:
        request.logprobs.chosen = True
        with _named("top_logprobs"):
            request.logprobs.top_n = options.top_logprobs or 0
    return request


def resume_request(
    request: target_pb2.GenerateRequest, seed: int, token_ids: Iterable[int]
) -> target_pb2.GenerateRequest:
    """The same request, to go on after `token_ids`, which were received under `seed`."""
    resumed = target_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.sampling.seed = seed
    resumed.generated_token_ids += pack_token_ids(token_ids)
    return resumed


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    ids = tuple(token_ids)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        wrong = next(each for each in ids if not _is_token_id(each))
        raise BadInputError(f"token_ids: {wrong!r} is no token id") from None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**32


def _set_prompt(request: target_pb2.GenerateRequest, prompt: Prompt) -> None:
    match prompt:
        case TextPrompt(text):
            request.text = text
        case ChatPrompt(messages):
            request.chat.SetInParent()
            for role, content in messages:
                request.chat.messages.add(role=role, content=content)
        case TokenPrompt(token_ids):
            request.token_ids = pack_token_ids(token_ids)


def _set_sampling(request: target_pb2.GenerateRequest, options: GenerateOptions) -> None:
    for name in (*SAMPLING_NAMES, "seed"):
        value = getattr(options, name)
        if value is not None:
            with _named(name):
                setattr(request.sampling, name, value)
    with _named("logit_bias"):
        for token_id, bias in options.logit_bias.items():
            request.sampling.logit_bias[token_id] = bias


def _set_stop(request: target_pb2.GenerateRequest, options: GenerateOptions) -> None:
    if options.max_tokens is not None:
        with _named("max_tokens"):
            request.stop.max_tokens = options.max_tokens
    if options.ignore_eos:
        request.stop.ignore_eos = True
    # Touching an empty submessage would not put it on the wire; extending it would.
    if isinstance(options.stop, str):
        raise BadInputError(f"stop: a list of texts is needed, such as [{options.stop!r}]")
    if options.stop:
        with _named("stop"):
            request.stop.strings.extend(options.stop)
    if options.stop_token_id:
        with _named("stop_token_id"):
            request.stop.token_ids.extend(options.stop_token_id)


def _set_speculation(request: target_pb2.GenerateRequest, options: GenerateOptions) -> None:
    if options.mode is not None:
        request.speculation.mode = _one_of("mode", options.mode, MODES)
    if options.verification is not None:
        request.speculation.verification = _one_of(
            "verification", options.verification, VERIFICATIONS
        )
    if options.draft:
        with _named("draft"):
            request.speculation.endpoints.extend(options.draft)
    for name in ("depth", "down_weight"):
        if getattr(options, name) is not None:
            with _named(name):
                setattr(request.speculation, name, getattr(options, name))


def _one_of(name: str, value: str, values: Mapping[str, Any]) -> Any:
    if value not in values:
        raise BadInputError(f"{name}: one of {', '.join(values)} is needed, got {value!r}")
    return values[value]


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What a message cannot hold is the caller's, and is called by its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{name}: {error}") from None
