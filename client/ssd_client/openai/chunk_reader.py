"""The events of one generation, read off the chunks that a gateway streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ssd_client.errors import ClientError
from ssd_client.generate.events import (
    Event,
    Finished,
    FinishReason,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)
from ssd_client.generate.speculation import SpeculationStats

_TOKEN = "token_id:"
# Without these there is nothing to say of speculation.
_NEEDED = {"mode", "rounds", "hits", "late", "stale", "length_misses", "token_misses"}


class ChunkReader:
    """Takes chunks in their order; `finished` says whether the last one was among them."""

    def __init__(self, address: str, body: Mapping[str, Any]) -> None:
        """`body`: what was asked for."""
        self._address, self._seed = address, body["seed"]
        self._request_id = body.get("request_id", "")
        self._top_n = body.get("top_logprobs", body.get("logprobs", 0))
        self._begun = False
        self._reason: str | None = None
        self._stopped_by: str | int | None = None
        self.finished = False
        self.num_tokens = 0

    def take(self, chunk: Any) -> Iterator[Event]:
        """Raises ClientError for the server's error, ValueError for what no gateway says."""
        if not isinstance(chunk, Mapping):
            raise ValueError(f"the server says {json.dumps(chunk)[:300]}")
        if error := chunk.get("error"):
            raise ClientError(f"{self._address}: {message_of(error)}")
        usage = chunk.get("usage") or {}
        if not self._begun:
            self._begun = True
            yield Started(
                self._address, self._request_id, self._seed, usage.get("prompt_tokens", 0), ""
            )
        for choice in chunk.get("choices") or ():
            yield from self._choice(choice)
        if not chunk.get("choices"):
            self.finished = True
            yield self._finish(usage, chunk.get("metrics") or {})

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Tokens]:
        if choice.get("finish_reason") is not None:
            self._reason, self._stopped_by = choice["finish_reason"], choice.get("stop_reason")
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        token_ids = tuple(choice.get("token_ids") or ())
        told = choice.get("token_origins") or ()
        if text or token_ids:
            self.num_tokens += len(token_ids)
            yield Tokens(
                token_ids,
                text,
                _logprobs(token_ids, choice.get("logprobs") or {}, self._top_n),
                tuple(each["origin"] for each in told),
                tuple(each["text"] for each in told),
            )

    def _finish(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> Finished:
        known = {each.value: each for each in FinishReason}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Finished(
            known.get(self._reason or "", FinishReason.UNKNOWN),
            self._stopped_by,
            Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), cached),
            self._seed,
            _speculation(metrics.get("ssd") or {}),
        )


def message_of(error: Any) -> str:
    """What an error in OpenAI's shape says."""
    found = error.get("message") if isinstance(error, Mapping) else None
    return found if isinstance(found, str) else json.dumps(error)[:300]


def _speculation(told: Mapping[str, Any]) -> SpeculationStats | None:
    """What a gateway tells has the names of our own statistics."""
    if not told.keys() >= _NEEDED:
        return None
    known = {each.name for each in fields(SpeculationStats)}
    values: dict[str, Any] = {name: value for name, value in told.items() if name in known}
    for name in ("drafted_per_position", "accepted_per_position"):
        values[name] = tuple(values.get(name, ()))
    return SpeculationStats(**values)


def _logprobs(
    token_ids: Sequence[int], told: Mapping[str, Any], top_n: int
) -> tuple[TokenLogprobs, ...]:
    """Reads both shapes, in which tokens are named by their ids. A completion has the chosen token
    among the most likely ones, as their last, also where it is none of them."""
    if "content" in told:
        return tuple(
            TokenLogprobs(
                _token_id(each["token"]),
                _number(each["logprob"]),
                tuple((_token_id(t["token"]), _number(t["logprob"])) for t in each["top_logprobs"]),
            )
            for each in told["content"]
        )
    rows = zip(
        token_ids, told.get("token_logprobs", ()), told.get("top_logprobs", ()), strict=False
    )
    return tuple(
        TokenLogprobs(
            token_id,
            _number(chosen),
            tuple((_token_id(name), _number(value)) for name, value in top.items())[:top_n],
        )
        for token_id, chosen, top in rows
    )


def _token_id(name: str) -> int:
    if not name.startswith(_TOKEN):
        raise ValueError(f"the server names a token {name!r}, not by its id")
    return int(name.removeprefix(_TOKEN))


def _number(value: float | None) -> float:
    """JSON has no infinity: null is a token that cannot be drawn."""
    return float("-inf") if value is None else value
