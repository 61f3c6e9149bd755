"""What happens in a generation, as plain dataclasses, and how it is read off the wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from ssd.v1 import target_pb2
from ssd_client.generate.speculation import SpeculationStats, origin_name, stats_of


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    UNKNOWN = "unknown"  # a newer server's reason


_REASONS = {
    target_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    target_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True)
class Started:
    """An endpoint accepted the request."""

    endpoint: str
    request_id: str
    seed: int
    prompt_tokens: int
    model_fingerprint: str
    model_digest: str = ""  # covers every byte; older targets send none

    def is_like(self, other: Started) -> bool:
        """Whether the model is the same, as far as both tell."""
        mine, theirs = (each.model_digest.split("-")[0] for each in (self, other))
        if mine and mine == theirs:
            return self.model_digest == other.model_digest
        return self.model_fingerprint == other.model_fingerprint


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability)


@dataclass(frozen=True)
class Tokens:
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[str, ...] = ()  # one for each token, where the server says it
    pieces: tuple[str, ...] = ()  # likewise, the text that each of them released


@dataclass(frozen=True)
class Moved:
    """An endpoint was lost, full or leaving; the request is sent to `to` after `wait_s`."""

    origin: str
    to: str
    tokens: int  # received so far
    full: bool
    wait_s: float
    reason: str
    leaving: bool = False  # it starts or stops, and said so


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    stopped_by: str | int | None
    usage: Usage
    seed: int
    speculation: SpeculationStats | None = None


Event = Started | Tokens | Moved | Finished


def event_of(response: target_pb2.GenerateResponse, endpoint: str) -> Event | None:
    """The event of one message; None for a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "started":
            return _started(response.started, endpoint)
        case "tokens":
            return _tokens(response.tokens)
        case "finish":
            return _finished(response.finish)
    return None


def _started(started: target_pb2.GenerateStarted, endpoint: str) -> Started:
    return Started(
        endpoint,
        started.request_id,
        started.seed,
        started.prompt_tokens,
        started.model_fingerprint,
        started.model_digest,
    )


def _tokens(tokens: target_pb2.GenerateTokens) -> Tokens:
    pairs = zip(tokens.token_ids, tokens.logprobs, strict=False)  # no logprobs: none were asked for
    logprobs = tuple(
        TokenLogprobs(token_id, each.chosen, tuple((t.token_id, t.logprob) for t in each.top))
        for token_id, each in pairs
    )
    origins = tuple(origin_name(each) for each in tokens.origins)
    return Tokens(tuple(tokens.token_ids), tokens.text, logprobs, origins, _pieces(tokens))


def _pieces(tokens: target_pb2.GenerateTokens) -> tuple[str, ...]:
    data, ends = tokens.text.encode(), [0, *accumulate(tokens.text_lengths)]
    return tuple(data[begin:end].decode("utf-8", "replace") for begin, end in pairwise(ends))


def _finished(finish: target_pb2.GenerateFinish) -> Finished:
    stopped_by = finish.WhichOneof("stopped_by")
    usage = finish.usage
    return Finished(
        reason=_REASONS.get(finish.reason, FinishReason.UNKNOWN),
        stopped_by=getattr(finish, stopped_by) if stopped_by else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens),
        seed=finish.seed,
        speculation=stats_of(finish.speculation) if finish.HasField("speculation") else None,
    )
