"""How a benchmark tells where it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ssd_client.bench.measure.requests import MeasuredRequest


class BenchProgress(Protocol):
    def run(
        self, title: str, requests: int
    ) -> AbstractContextManager[Callable[[MeasuredRequest], None]]:
        """Shows a run for as long as its block lasts; yields what is told of each request."""

    def note(self, line: str) -> None: ...
