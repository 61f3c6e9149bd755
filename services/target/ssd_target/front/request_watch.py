"""Follows one request for metrics, the log and its trace; its text only where an operator asks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ssd_engine.errors import InputError, SSDError
from ssd_serving.observability.telemetry import Span, Spans
from ssd_serving.rpc.status import for_log
from ssd_target.front.metrics import RequestTimer, TargetMetrics
from ssd_target.front.parsing import INLINE_BYTES
from ssd_target.front.requests import MAX_REQUEST_ID_BYTES, ParsedRequest, parse_message
from ssd_target.records.engine_records import Delta
from ssd_target.records.speculation_stats import SpeculationStats

log = logging.getLogger(__name__)

SPAN = "ssd.target.generate"
GOOD = ("stop", "length")


@dataclass(frozen=True)
class Watches:
    """The metrics, spans and settings that the requests of a server are watched with."""

    metrics: TargetMetrics
    spans: Spans
    log_prompts: bool

    def begin(self, context: grpc.aio.ServicerContext) -> "RequestWatch":
        parent = dict(context.invocation_metadata() or ()).get("traceparent")
        return RequestWatch(self.metrics, self.spans.begin(SPAN, parent), self.log_prompts)


class RequestWatch:
    def __init__(self, metrics: TargetMetrics, span: Span, log_prompts: bool) -> None:
        self._timer = RequestTimer(metrics)
        self._metrics = metrics
        self._span = span
        self._output: list[str] | None = [] if log_prompts else None
        self._about: dict[str, Any] = {}  # for the log
        self._tokens = 0
        self._stats: SpeculationStats | None = None

    @property
    def trace_context(self) -> str:
        return self._span.context

    def known_as(self, **about: str) -> None:
        """``request_id``, and ``identity`` where there is one."""
        self._about |= about
        self._span.set(**about)

    def refused(self, data: bytes) -> None:
        """It was refused, or failed: where it was not named yet, it may have named itself."""
        if "request_id" not in self._about and (name := _request_id(data)) is not None:
            self.known_as(request_id=name)

    def started(self, request: ParsedRequest, sequence: int, prompt: Callable[[], str]) -> None:
        """It is a sequence of the engine now. ``prompt`` gives its text."""
        self._metrics.prompt_tokens.inc(len(request.prompt))
        self._about |= {"sequence": sequence, "prompt_tokens": len(request.prompt)}
        self._span.set(sequence=sequence, prompt_tokens=len(request.prompt))
        self._span.event("queued")
        words = (request.request_id, sequence, len(request.prompt))
        message = "request %r starts: sequence %d, %d prompt tokens"
        if self._output is None:
            log.debug(message, *words, extra=self._about)
        else:
            text = prompt()
            extra = {**self._about, "prompt": text}
            log.info(f"{message}, prompt %r", *words, text, extra=extra)

    def deltas(self, batch: list[Delta]) -> None:
        count = sum(len(delta.tokens) for delta in batch)
        if not self._tokens and count:
            begun_at = batch[0].begun_at
            if begun_at is not None:
                self._span.event("prefill", begun_at)
            self._span.event("first token")
        self._timer.tokens(count)
        self._tokens += count
        self._stats = batch[-1].speculation or self._stats

    def text(self, piece: str) -> None:
        if self._output is not None:
            self._output.append(piece)

    def end(self, outcome: str, error: SSDError | None) -> float:
        """Returns the seconds that it took."""
        seconds = self._timer.end(outcome)
        self._log_end(outcome, error, seconds)
        self._span.set(outcome=outcome, completion_tokens=self._tokens)
        if self._stats is not None:
            self._span.set(**_speculation(self._stats))
        if outcome in GOOD:
            self._span.event("finish")
        why = outcome if error is None else for_log(error)
        self._span.end(None if outcome in GOOD else why)
        return seconds

    def _log_end(self, outcome: str, error: SSDError | None, seconds: float) -> None:
        about = {"outcome": outcome, "tokens": self._tokens, "seconds": round(seconds, 4)}
        reason = "" if error is None else for_log(error)
        extra = {**self._about, **about, **({"reason": reason} if reason else {})}
        if self._output is not None:
            extra["output"] = "".join(self._output)
        why = f" ({reason})" if reason else ""
        said = f", output {extra['output']!r}" if self._output is not None else ""
        name = self._about.get("request_id", "?")
        log.info(
            "request %r ended: %s%s, %d tokens in %.3f s%s",
            *(name, outcome, why, self._tokens, seconds, said),
            extra=extra,
        )


def _request_id(data: bytes) -> str | None:
    if len(data) > INLINE_BYTES:
        return None  # is not parsed just for that
    try:
        name = parse_message(data).request_id
    except InputError:
        return None
    return name if 0 < len(name.encode()) <= MAX_REQUEST_ID_BYTES else None


def _speculation(stats: SpeculationStats) -> dict[str, int | float]:
    look_ups = stats.hits + stats.late + stats.stale + stats.length_misses + stats.token_misses
    return {
        "rounds": stats.rounds,
        "draft_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "hit_rate": stats.hits / look_ups if look_ups else 0.0,
    }
