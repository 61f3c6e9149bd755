"""What a benchmark was asked to do, and the runs that it consists of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

MODES = ("off", "sync", "ssd")


@dataclass(frozen=True, order=True)
class RunKey:
    """One pass over all prompts."""

    repeat: int
    load: float  # requests at a time; with a rate, requests a second
    mode: str  # or the name of a baseline


@dataclass(frozen=True)
class Settings:
    data: str
    num_prompts: int
    modes: tuple[str, ...]
    concurrency: tuple[int, ...] = (1,)
    request_rate: tuple[float, ...] = ()  # instead of a closed loop
    repeats: int = 3
    warm_up: int = 1  # requests in every mode
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    depth: int | None = None
    chat: bool = True
    baselines: tuple[str, ...] = ()
    json_schema: str | None = None  # that the texts follow

    @property
    def loads(self) -> tuple[float, ...]:
        return self.request_rate or tuple(float(each) for each in self.concurrency)

    @property
    def alone(self) -> bool:
        """The first load is one request at a time, of which the theory speaks."""
        return not self.request_rate and self.loads[0] == 1.0

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*self.modes, *self.baselines)

    def runs(self) -> Iterator[RunKey]:
        """Modes take turns, so that what changes with time changes for all of them."""
        return itertools.starmap(
            RunKey, itertools.product(range(self.repeats), self.loads, self.kinds)
        )
