"""How a benchmark tells where it is."""

from __future__ import annotations

from typing import Protocol

from ssd_client.bench.requests import Measured


class Progress(Protocol):
    def begin(self, title: str, requests: int) -> None: ...

    def seen(self, measured: Measured) -> None: ...

    def end(self) -> None: ...

    def note(self, line: str) -> None: ...
