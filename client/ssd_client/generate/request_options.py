"""The options of a request, as `Client`, `AsyncClient` and the commands take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


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
    min_tokens: int  # neither a stop nor the end of sequence before so many
    stop: Sequence[str]
    stop_token_id: Sequence[int]
    ignore_eos: bool
    json_schema: str | Mapping[str, Any]  # the text is a JSON value that it describes
    regex: str  # or it matches this
    choice: Sequence[str]  # or it is one of these
    grammar: str  # or a context-free grammar describes it: Lark or GBNF
    logprobs: bool
    top_logprobs: int
    mode: str  # "ssd", "sync" or "off"
    draft: Sequence[str]  # speculation endpoints, HOST:PORT
    depth: int
    verification: str  # "coupled" or "rejection"
    down_weight: float
    chat_template_kwargs: Mapping[str, Any]
    cache_salt: str  # what is cached of a prompt is found with the same one alone
