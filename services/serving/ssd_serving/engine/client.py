"""The front's side of an engine process: start it, speak to it, notice its end."""

import array
import asyncio
import contextlib
import fcntl
import logging
import queue
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ssd_engine.errors import EXIT_NODE_LOST, EXIT_RANK_DIED, ConfigError, SSDError
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.tracing.events import TraceEvent, TraceRing
from ssd_serving.engine.entry import enter
from ssd_serving.engine.record_reader import PipeEnded, RecordReader
from ssd_serving.engine.records import Beat, Fatal, Ready, encode

log = logging.getLogger(__name__)

SAFE_BYTES = 32_768  # less than any socket's buffer
EXIT_SECONDS = 5.0  # from the end of the pipe to that of the process
EXIT_POLL_SECONDS = 0.01
_LOST = {EXIT_RANK_DIED: "a tensor-parallel rank died", EXIT_NODE_LOST: "a node was lost"}


class EngineGone(SSDError):
    """The engine process ended; what was running there is lost."""


class EngineProcess(ABC):
    """Owns the engine process. Use from one event loop."""

    def __init__(
        self,
        module: str,
        options: Any,
        decode: Callable[[bytes], Any],
        outbox: int = 0,
        trace_events: int = 0,
        forks: ForkServer | None = None,
    ) -> None:
        """``module`` has the engine's ``engine_main``. ``outbox`` bounds the records on their way
        to the engine; 0: others bound them. ``trace_events``: so many are kept. ``forks`` forks
        the engine; None: one that starts with it does."""
        self._forks = forks
        self._module = module
        self._options = options
        self._decode = decode
        self._outbox: queue.Queue[bytes | None] = queue.Queue(outbox)
        self._fatal: Fatal | None = None
        self._exit: asyncio.Task[None] | None = None  # from the end of the pipe on
        self._heard_at = time.monotonic()
        self.num_blocks = 0  # of the KV cache, once it is loaded
        self.stalled: str | None = None  # why it serves nobody now
        self.trace = TraceRing(trace_events) if trace_events else None

    @abstractmethod
    def dispatch(self, record: Any) -> None:
        """A record of the engine that is neither Ready nor Fatal."""

    @abstractmethod
    def drain(self) -> None:
        """Tell the engine that nothing new will come, and what it has to do now."""

    @abstractmethod
    def end_all(self, error: SSDError) -> None:
        """Tell everybody who waits that it ends with this error."""

    def abandon(self, reason: str) -> None:
        """Tell everybody who waits that nothing more will come."""
        self.end_all(EngineGone(reason))

    @abstractmethod
    def forget(self) -> None:
        """Let go of all that the engine which has ended knew of."""

    def start(self) -> None:
        """Also again, once the engine is gone."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self._outbox = queue.Queue(self._outbox.maxsize)  # the thread of the last one has its own
        self._fatal, self._exit = None, None
        self._heard_at = time.monotonic()
        if self._forks is None:
            self._forks = ForkServer([self._module])
        self._pipe, theirs = Pipe()
        self._incoming = RecordReader(self._pipe)
        self._process = self._forks.start("ssd-engine", enter, self._module, theirs, self._options)
        theirs.close()  # so that the engine's end is the only one, and its death an EOF
        loop.add_reader(self._pipe.fileno(), self._read)
        threading.Thread(target=_write, args=(self._outbox, self._pipe), daemon=True).start()

    @property
    def may_start_again(self) -> bool:
        """True if the engine has ended by itself, and by nothing that would end it again at once:
        after a record that could not be taken in, nobody knows what this process holds."""
        return self._exit is not None and not (self._fatal is not None and self._fatal.bad_config)

    def keep(self, events: list[TraceEvent]) -> None:
        """Add events to the trace that is kept of the engine, if any."""
        if self.trace is not None:
            self.trace.add(events)

    @property
    def silent_seconds(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self._heard_at

    def raise_if_stalled(self) -> None:
        """Raises EngineGone where the engine is stalled, or gone."""
        if self.gone.done():
            raise EngineGone(self.gone.result())
        if self.stalled is not None:
            raise EngineGone(self.stalled)

    @property
    def backlog(self) -> int:
        """Records that have not begun their way to the engine."""
        return self._outbox.qsize()

    def send(self, record: Any) -> None:
        """Sends records in order, from the event loop alone.

        What surely fits into the pipe is written at once: a thread would take its time to wake.
        """
        data = encode(record)
        if self._outbox.unfinished_tasks == 0 and _fits(self._pipe, len(data)):
            with contextlib.suppress(OSError):  # the engine is gone, as the reader will notice
                self._pipe.send_bytes(data)
        else:
            self._outbox.put_nowait(data)

    def raise_if_gone(self) -> None:
        if not self.gone.done():
            return
        if self._fatal is not None and self._fatal.bad_config:
            raise ConfigError(self._fatal.message)
        raise EngineGone(f"the service ends: {self.gone.result()}")

    async def stop(self) -> None:
        """End the process; it holds nothing that is worth a farewell."""
        await self.end_engine()
        if self._forks is not None:
            self._forks.stop()

    async def end_engine(self) -> None:
        """End the engine alone, what is left of it, and forget what it knew of."""
        self._stop_reading()
        if self._exit is not None:
            self._exit.cancel()
        if self._process.is_forked:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        with contextlib.suppress(queue.Full):  # then its thread has something to fail with
            self._outbox.put_nowait(None)
        self.forget()

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())

    def _read(self) -> None:
        """Takes in what has come. After a record that cannot be taken in nobody knows which tokens
        a stream lacks: the service ends, as it does when the engine dies."""
        self._heard_at = time.monotonic()
        try:
            for record in self._incoming.read():
                self._receive(self._decode(record))
        except PipeEnded:
            self._stop_reading()
            self._exit = asyncio.get_running_loop().create_task(self._await_exit())
        except Exception as error:
            log.exception("a record of the engine could not be taken in")
            self._stop_reading()
            self._end(f"a record of the engine could not be taken in: {error!r}")

    def _receive(self, record: Any) -> None:
        match record:
            case Ready():
                self.num_blocks = record.num_blocks
                self.ready.set_result(record)
            case Fatal():
                self._fatal = record
            case Beat():
                pass
            case _:
                self.dispatch(record)

    async def _await_exit(self) -> None:
        """The pipe ends a moment before the process does, whose exit code says why."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                while self._process.exitcode is None:
                    await asyncio.sleep(EXIT_POLL_SECONDS)
        self._end(self._why_gone())

    def _why_gone(self) -> str:
        if self._fatal is not None:
            return self._fatal.message
        code = self._process.exitcode
        if code is None:
            return "the engine process closed its pipe and did not end"
        return _LOST.get(code, f"the engine process ended with exit code {code}")

    def _end(self, reason: str) -> None:
        """The engine is gone, or as good as gone; whoever runs the service ends it."""
        try:
            self.abandon(reason)
        finally:
            self.gone.set_result(reason)


def _fits(pipe: Connection, size: int) -> bool:
    """Whether the pipe takes so many bytes without making the writer wait."""
    unread = array.array("i", [0])
    fcntl.ioctl(pipe.fileno(), termios.TIOCOUTQ, unread)
    return unread[0] + size < SAFE_BYTES


def _write(outbox: "queue.Queue[bytes | None]", pipe: Connection) -> None:
    """Runs on a thread: a pipe to a busy engine may block, and the event loop may not."""
    while (data := outbox.get()) is not None:
        try:
            pipe.send_bytes(data)
        except OSError:
            log.debug("the engine reads no more")
            return
        outbox.task_done()
