"""The engine's end of the pipe to its front, whose waits rows on a tensor plane end, too."""

import select
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ssd_engine.tensor_plane.transports.connection import Wake
from ssd_serving.engine.pipe_poll import PipePoll


class WakingInbox:
    def __init__(self, pipe: Connection, decode: Callable[[bytes], Any], wake: Wake) -> None:
        self._pipe, self._decode, self._wake = pipe, decode, wake
        self._has_data = PipePoll(pipe)

    def poll(self, seconds: float | None) -> bool:
        """Whether a record is there, or comes in time; a wait ends without one when rows come."""
        if seconds == 0:
            return self._has_data(0)
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            return self._wake.wait(self._pipe.fileno(), select.POLLIN, deadline)
        except TimeoutError:
            return False

    def receive(self) -> Any:
        return self._decode(self._pipe.recv_bytes())

    def send(self, data: bytes) -> None:
        self._pipe.send_bytes(data)
