"""One request of a benchmark, measured; and many of them, as fast as they are asked for."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from ssd_client.connection.waiting import take
from ssd_client.errors import ClientError
from ssd_client.generate.api import Client
from ssd_client.generate.events import Tokens
from ssd_client.generate.request import Prompt
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.speculation import SpeculationStats


@dataclass(frozen=True)
class MeasuredRequest:
    """A request that has ended; times in seconds of one monotonic clock."""

    prompt: int  # its number
    begin: float
    end: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, so many tokens
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0][0] - self.begin if self.arrivals else None

    @property
    def e2el_s(self) -> float:
        return self.end - self.begin

    @property
    def itls_s(self) -> list[float]:
        """Seconds between one arrival of tokens and the next."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.num_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        """Times become milliseconds after its begin."""
        content = asdict(self)
        begin = content.pop("begin")
        content["e2el_ms"] = 1e3 * (content.pop("end") - begin)
        content["arrivals"] = [[1e3 * (at - begin), count] for at, count in self.arrivals]
        return content


Ask = Callable[[int, str], MeasuredRequest]


def total_stats(done: Iterable[MeasuredRequest]) -> SpeculationStats:
    return sum((each.stats for each in done), SpeculationStats())


def ask_target(
    client: Client, number: int, prompt: Prompt, options: RequestOptions
) -> MeasuredRequest:
    arrivals: list[tuple[float, int]] = []
    error = None
    with client.stream(prompt, **options) as events:
        result = events.result
        try:
            for event in events:
                if isinstance(event, Tokens) and event.token_ids:
                    arrivals.append((time.monotonic(), len(event.token_ids)))
        except ClientError as failure:
            error = str(failure)
    return MeasuredRequest(
        number,
        result.timing.sent,
        result.timing.ended or result.timing.sent,
        arrivals,
        result.token_ids,
        result.text,
        result.started.prompt_tokens if result.started else 0,
        result.speculation or SpeculationStats(),
        error,
    )


def closed_loop(
    ask: Ask, prompts: Sequence[str], concurrency: int, seen: Callable[[MeasuredRequest], None]
) -> list[MeasuredRequest]:
    """Asks so many at a time, the next one as soon as one has ended."""
    return _ask_all(ask, prompts, concurrency, seen, [0.0] * len(prompts))


def open_loop(
    ask: Ask,
    prompts: Sequence[str],
    rate: float,
    seed: int,
    seen: Callable[[MeasuredRequest], None],
) -> list[MeasuredRequest]:
    """A Poisson process: so many a second, whether others have ended or not."""
    rng = random.Random(seed)
    moments = accumulate(rng.expovariate(rate) for _ in prompts)
    return _ask_all(ask, prompts, len(prompts), seen, list(moments))


def _ask_all(
    ask: Ask,
    prompts: Sequence[str],
    at_once: int,
    seen: Callable[[MeasuredRequest], None],
    moments: Sequence[float],
) -> list[MeasuredRequest]:
    """Asks on threads that nobody waits for when the user has had enough."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[MeasuredRequest | BaseException] = queue.SimpleQueue()
    for number in range(len(prompts)):
        waiting.put(number)
    begin = time.monotonic()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                time.sleep(max(0.0, begin + moments[number] - time.monotonic()))
                try:
                    ended.put(ask(number, prompts[number]))
                except BaseException as error:
                    ended.put(error)

    for _ in range(min(at_once, len(prompts))):
        threading.Thread(target=work, name="bench", daemon=True).start()
    done = [_next(ended, seen) for _ in prompts]
    return sorted(done, key=lambda measured: measured.prompt)


def _next(
    ended: queue.SimpleQueue[MeasuredRequest | BaseException],
    seen: Callable[[MeasuredRequest], None],
) -> MeasuredRequest:
    measured = take(ended)
    if isinstance(measured, BaseException):
        raise measured
    seen(measured)
    return measured
