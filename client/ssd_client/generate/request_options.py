"""The options of a request, and how they become one, for both `Client` and `AsyncClient`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ssd.v1 import target_pb2
from ssd_client.errors import BadInputError
from ssd_client.generate.request import (
    ChatPrompt,
    GenerateOptions,
    Prompt,
    TextPrompt,
    TokenPrompt,
    build_request,
)

Asked = str | Sequence[int] | Prompt  # a text, token ids, or a prompt
Message = Mapping[str, str] | tuple[str, str]  # {"role": .., "content": ..}, or (role, content)
Messages = str | Sequence[Message]  # a text: one message of a user


class RequestOptions(TypedDict, total=False):
    """Everything about a request but its prompt; what is left out is left to the server."""

    request_id: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]  # token id to what is added
    seed: int
    max_tokens: int
    stop: Sequence[str]
    stop_token_id: Sequence[int]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    mode: str  # "ssd", "sync" or "off"
    draft: Sequence[str]  # speculation endpoints, HOST:PORT
    depth: int
    verification: str  # "coupled" or "rejection"
    down_weight: float
    chat_template_kwargs: Mapping[str, Any]
    cache_salt: str  # what is cached of a prompt is found with the same one alone


def request_of(prompt: Prompt, options: Mapping[str, Any]) -> target_pb2.GenerateRequest:
    """Raises BadInputError where a value cannot be sent; the server judges the rest."""
    unknown = options.keys() - GenerateOptions.__dataclass_fields__.keys()
    if unknown:
        raise BadInputError(f"{', '.join(sorted(unknown))}: no such option")
    return build_request(prompt, GenerateOptions(**options))


def prompt_of(asked: Asked) -> Prompt:
    if isinstance(asked, str):
        return TextPrompt(asked)
    if isinstance(asked, TextPrompt | ChatPrompt | TokenPrompt):
        return asked
    return TokenPrompt(tuple(asked))


def chat_of(messages: Messages) -> ChatPrompt:
    if isinstance(messages, str):
        return ChatPrompt((("user", messages),))
    return ChatPrompt(tuple(map(_message, messages)))


def _message(message: Message) -> tuple[str, str]:
    if isinstance(message, tuple):
        return message
    try:
        return message["role"], message["content"]
    except KeyError as missing:
        raise BadInputError(f"messages: {missing.args[0]!r} is missing in {message!r}") from None
