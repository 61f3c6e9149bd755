"""How work ends when the gateway leaves: what runs gets some time, and then is told so."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ssd_gateway.http.errors import SERVER, ApiError


def leaving() -> ApiError:
    return ApiError(503, "the gateway is leaving; try again", SERVER, code="leaving", retry_after=1)


class Drain:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: that what runs gets."""
        self.seconds, self._clock = seconds, clock
        self.is_over = False
        self._begun_at: float | None = None
        self._endings: dict[object, Callable[[], object]] = {}

    @property
    def begun(self) -> bool:
        """From here on new work is refused."""
        return self._begun_at is not None

    @property
    def is_done(self) -> bool:
        """True once nothing runs any more, or has had its time."""
        if self._begun_at is None:
            return False
        return not self._endings or self._clock() - self._begun_at >= self.seconds

    def begin(self) -> None:
        self._begun_at = self._clock() if self._begun_at is None else self._begun_at

    @contextmanager
    def running(self, end: Callable[[], object]) -> Iterator[None]:
        """Counts what is done inside as work; ``end`` cuts it short, so that its caller is told."""
        mark = object()
        self._endings[mark] = end
        try:
            if self.is_over:
                end()
            yield
        finally:
            del self._endings[mark]

    def end_all(self) -> None:
        self.is_over = True
        for end in list(self._endings.values()):
            end()
