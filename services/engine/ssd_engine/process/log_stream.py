"""Text on its way to a log whose reader may stop.

A pipe that nobody reads is full after 64 KiB, and then holds up whoever writes to it. So one thread
of a process writes, and all others put what they have to say into a queue. Where the queue is full,
lines are lost and counted; how many they were is said when they are read again.
"""

import contextlib
import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_BYTES = 1 << 20  # that wait; one line alone may be longer
# The system writes so many in one piece: lines of processes that share a pipe stay whole.
WHOLE_BYTES = select.PIPE_BUF


class QueuedStream(io.TextIOBase):
    """Takes the place of a text stream with a descriptor. It never takes that stream's own locks: a
    writer that is held up would keep them."""

    def __init__(self, stream: TextIO, max_bytes: int = MAX_BYTES) -> None:
        self._stream = stream  # which would close its descriptor when it goes
        self._descriptor = stream.fileno()
        self._encoding, self._errors = stream.encoding, stream.errors or "strict"
        self._max_bytes = max_bytes
        self.lost_line: Callable[[int], str] = "{} lines were lost\n".format
        self._changed = threading.Condition()  # guards what follows
        self._lines: deque[bytes] = deque()
        self._unwritten = 0  # bytes of these, and of those that are being written
        self._lost = 0
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return self._errors

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Never waits. After a loss nothing is taken until that has been said: so the line about
        it stands where lines are missing."""
        data = text.encode(self._encoding, self._errors)
        with self._changed:
            full = self._unwritten and self._unwritten + len(data) > self._max_bytes
            if self._lost or full:
                self._lost += 1
            elif data:
                self._add(data)
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Whether all that was said is written within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._unwritten or self._lost), seconds)

    def _add(self, data: bytes) -> None:
        self._lines.append(data)
        self._unwritten += len(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            data = self._next()
            with contextlib.suppress(OSError):  # the reader has gone for good
                self._write(data)
            with self._changed:
                self._unwritten -= len(data)
                self._changed.notify_all()

    def _next(self) -> bytes:
        """As many lines as are written in one piece, or a longer one."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._lost)
            if not self._lines:
                lost, self._lost = self._lost, 0
                self._add(self.lost_line(lost).encode(self._encoding, self._errors))
            taken = [self._lines.popleft()]
            size = len(taken[0])
            while self._lines and size + len(self._lines[0]) <= WHOLE_BYTES:
                size += len(self._lines[0])
                taken.append(self._lines.popleft())
        return b"".join(taken)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares the descriptor made it so
                select.select([], [self._descriptor], [])
