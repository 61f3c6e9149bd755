"""The responses of a call, read by a thread of their own.

A signal raises its exception wherever the main thread happens to be. Inside gRPC's wait for a
response that may be between giving a lock back and taking it again: out comes an error about the
lock, not Ctrl-C. So the main thread waits at a queue, which a signal leaves whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from ssd.v1 import target_pb2
from ssd_client.connection.waiting import take

_AHEAD = 64  # responses; further ones wait in the network, where the server notices it


@dataclass(frozen=True)
class _End:
    error: Exception | None  # what ended the call, if not its server's own end


class Responses:
    """Iterates over the responses of a call and raises what ended it; `close` cancels the call."""

    def __init__(self, call: grpc.Call, look: Callable[[], None] | None = None) -> None:
        """`look` is called now and then while nothing comes; what it raises ends the iteration."""
        self._call, self._look = call, look
        self._read: queue.SimpleQueue[target_pb2.GenerateResponse | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_AHEAD):
            self._room.put(None)
        threading.Thread(target=self._run, name="responses", daemon=True).start()

    def __iter__(self) -> Iterator[target_pb2.GenerateResponse]:
        while not isinstance(response := take(self._read, self._look), _End):
            yield response
            self._room.put(None)
        if response.error is not None:
            raise response.error

    def let_end(self, seconds: float) -> None:
        """Waits for the end that follows the last response, so that the server sees no cancel."""
        with contextlib.suppress(queue.Empty):
            self._read.get(timeout=seconds)

    def close(self) -> None:
        self._call.cancel()
        self._room.put(None)  # the thread may wait for it

    def _run(self) -> None:
        try:
            for response in self._call:
                self._read.put(response)
                self._room.get()
        except Exception as error:
            self._read.put(_End(error))
        else:
            self._read.put(_End(None))
