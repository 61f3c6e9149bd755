"""What both ends of a plane share: a state, and one thread that connects, works and cleans up.

The thread owns every resource, and the engine's loop never waits for it: closing is a word to the
thread. It is idle in a wait on the plane's connection, not in a posted receive.
"""

import atexit
import logging
import threading
import time
from contextlib import ExitStack

from ssd_engine.tensor_plane.plane import AgreedPlane
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.state import PlaneEvent, PlaneState, transition
from ssd_engine.tensor_plane.protocol.streams import RowsStream
from ssd_engine.tensor_plane.transports.connection import STALL_SECONDS, PlaneThreadStopped, Wake

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0  # the thread's own timeout comes first, and knows more


class PlaneEnd:
    def __init__(self, plane: AgreedPlane, sends: bool) -> None:
        self._plane, self._stream = plane, plane.terms.stream
        if (self._stream.direction is plane.outward) is not sends:
            raise ValueError(f"{self._stream.name} goes {self._stream.direction.value}")
        self._news = threading.Condition()  # guards everything that both threads touch
        self._state = PlaneState.CONNECTING
        self.reason = ""  # why the plane broke; empty while it did not
        self.came_up = False
        self._wake = Wake()
        role = "sender" if sends else "receiver"
        self._name = f"{plane.terms.kind.value} {role} of {self._stream.name} {plane.terms.epoch}"
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        # A thread that comes out of a library while the interpreter goes down takes the process
        # with it: it has to be gone by then.
        atexit.register(self._leave)

    @property
    def kind(self) -> PlaneKind:
        return self._plane.terms.kind

    @property
    def stream(self) -> RowsStream:
        return self._stream

    @property
    def state(self) -> PlaneState:
        # A library that is stuck in connecting cannot be interrupted; it can be given up.
        overdue = time.monotonic() > self._plane.deadline + GRACE_SECONDS
        if self._state is PlaneState.CONNECTING and overdue:
            self._advance(PlaneEvent.FAILED, "connecting took too long")
        return self._state

    def close(self) -> None:
        """End the plane. Returns at once; the thread frees everything and ends."""
        self._advance(PlaneEvent.CLOSE)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is freed, which follows a close or a break; True: it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, resources: ExitStack) -> None:
        """In the thread: connect, report CONNECTED, work until stopped."""
        raise NotImplementedError

    def _forget_rows(self) -> None:
        """Drop what waits on this end; it is over. Called with the lock held."""
        raise NotImplementedError

    def _main(self) -> None:
        try:
            with ExitStack() as resources:
                resources.callback(atexit.unregister, self._leave)
                resources.callback(self._wake.close)
                self._run_to_the_end(resources)
        except Exception:
            log.exception("%s left something behind", self._name)

    def _run_to_the_end(self, resources: ExitStack) -> None:
        try:
            self._run(resources)
        except PlaneThreadStopped:
            pass
        except Exception as error:
            # Whatever a peer or a library does ends this plane and nothing else.
            self._advance(PlaneEvent.FAILED, str(error) or type(error).__name__)

    def _leave(self) -> None:
        self.close()
        self.join(STALL_SECONDS + GRACE_SECONDS)

    def _advance(self, event: PlaneEvent, reason: str = "") -> None:
        with self._news:
            before, self._state = self._state, transition(self._state, event)
            if self._state is before:
                return
            self.reason = reason or self.reason
            self.came_up |= self._state is PlaneState.UP
            if self._state in (PlaneState.BROKEN, PlaneState.CLOSED):
                self._forget_rows()
                self._wake.stop()
            self._news.notify_all()
            log.info("%s is %s %s", self._name, self._state.value, reason)
