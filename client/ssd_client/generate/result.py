"""The sum of a generation's events: its text, its tokens, and when they came."""

from __future__ import annotations

from dataclasses import dataclass, field

from ssd_client.generate.events import Event, Finished, Started, TokenLogprobs, Tokens
from ssd_client.generate.speculation import SpeculationStats


@dataclass
class Timing:
    """Moments of one generation, in seconds of one monotonic clock."""

    sent: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def first_after_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.sent

    def total_s(self) -> float | None:
        return None if self.ended is None else self.ended - self.sent

    def tokens_per_s(self, tokens: int) -> float | None:
        """The rate after the first token; None where the tokens span no time."""
        if self.first_token is None or self.last_token is None or tokens < 2:
            return None
        span = self.last_token - self.first_token
        return (tokens - 1) / span if span > 0 else None


@dataclass
class GenerationResult:
    """Grows with every event; complete once `finished` is set."""

    timing: Timing
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # one for each token, if the server says it
    started: Started | None = None
    finished: Finished | None = None
    endpoints: list[str] = field(default_factory=list)  # those that accepted the request, in order
    resumed: int = 0
    # Only a finish says how its part of the generation was sped up; a lost part counts nowhere.
    speculation: SpeculationStats | None = None
    speculation_tokens: int = 0  # tokens that came in those parts
    _part_begins: int = 0

    def add(self, event: Event, now: float) -> None:
        self.timing.ended = now
        match event:
            case Started():
                self._start(event)
            case Tokens():
                self._take(event, now)
            case Finished():
                self._finish(event)

    def end(self, now: float) -> None:
        """The generation ends without a finish."""
        self.timing.ended = now

    @property
    def completion_tokens(self) -> int:
        return self.finished.usage.completion_tokens if self.finished else len(self.token_ids)

    def _start(self, started: Started) -> None:
        self.resumed += bool(self.token_ids)
        self.started = started
        self.endpoints.append(started.endpoint)
        self._part_begins = len(self.token_ids)

    def _take(self, tokens: Tokens, now: float) -> None:
        self.text += tokens.text
        self.token_ids += tokens.token_ids
        self.logprobs += tokens.logprobs
        self.origins += tokens.origins
        if tokens.token_ids:
            self.timing.last_token = now
            if self.timing.first_token is None:
                self.timing.first_token = now

    def _finish(self, finished: Finished) -> None:
        self.finished = finished
        stats = finished.speculation
        if stats is not None:
            self.speculation = self.speculation + stats if self.speculation else stats
            self.speculation_tokens += len(self.token_ids) - self._part_begins
