"""How a benchmark tells where it is."""

from __future__ import annotations

from typing import Protocol

from ssd_client.bench.measure.requests import MeasuredRequest


class BenchProgress(Protocol):
    def begin(self, title: str, requests: int) -> None: ...

    def seen(self, measured: MeasuredRequest) -> None: ...

    def end(self) -> None: ...

    def note(self, line: str) -> None: ...
