"""The front's side of the engine process: submit, follow, cancel."""

import asyncio
import logging
import multiprocessing
import queue
import threading
from multiprocessing.connection import Connection

from ssd_engine.errors import EXIT_RANK_DIED, ConfigError, SSDError
from ssd_engine.processes import terminal_signals_blocked
from ssd_target.config import EngineOptions
from ssd_target.engine_entry import enter
from ssd_target.records import (
    Cancel,
    Delta,
    Fatal,
    Ready,
    Stats,
    StepOutput,
    Submit,
    ToEngine,
    Vocabulary,
    decode_to_front,
    encode,
)

log = logging.getLogger(__name__)

OUTBOX = 65536  # records; each live request puts two, so this is never reached by honest use


class EngineGone(SSDError):
    """The engine process ended; what was running there is lost."""


class EngineClient:
    """Owns the engine process. Use from one event loop."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._streams: dict[int, asyncio.Queue[Delta | EngineGone]] = {}
        self._next_id = 0
        self._outbox: queue.Queue[ToEngine] = queue.Queue(OUTBOX)
        self._fatal: Fatal | None = None
        self.stats: Stats | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=enter, args=(theirs, self._options), name="engine")
        with terminal_signals_blocked():
            self._process.start()
        theirs.close()  # so that the engine's end is the only one, and its death an EOF
        loop.add_reader(self._pipe.fileno(), self._read)
        threading.Thread(target=_write, args=(self._outbox, self._pipe), daemon=True).start()

    def raise_if_gone(self) -> None:
        if not self.gone.done():
            return
        if self._fatal is not None and self._fatal.bad_config:
            raise ConfigError(self._fatal.message)
        raise EngineGone(f"the service ends: {self.gone.result()}")

    def send_vocabulary(self, token_bytes: list[bytes]) -> None:
        self._outbox.put_nowait(Vocabulary(token_bytes))

    def open(self) -> tuple[int, "asyncio.Queue[Delta | EngineGone]"]:
        """A new sequence id and the queue on which its deltas arrive."""
        if self.gone.done():
            raise EngineGone(self.gone.result())
        self._next_id += 1
        self._streams[self._next_id] = asyncio.Queue()
        return self._next_id, self._streams[self._next_id]

    def submit(self, record: Submit) -> None:
        self._outbox.put_nowait(record)

    def close(self, sequence: int, finished: bool) -> None:
        """Forget a sequence; one that is not finished is cancelled."""
        if self._streams.pop(sequence, None) is not None and not finished:
            self._outbox.put_nowait(Cancel(sequence))

    def abandon(self, reason: str) -> None:
        """Tell everybody who waits that nothing more will come."""
        for stream in self._streams.values():
            stream.put_nowait(EngineGone(reason))

    async def stop(self) -> None:
        """End the process; it holds nothing that is worth a farewell."""
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                self._dispatch(decode_to_front(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._on_exit()

    def _dispatch(self, record: Ready | StepOutput | Fatal) -> None:
        match record:
            case StepOutput():
                self.stats = record.stats
                for delta in record.deltas:
                    stream = self._streams.get(delta.sequence)
                    if stream is not None:
                        stream.put_nowait(delta)
            case Ready():
                self.ready.set_result(record)
            case Fatal():
                self._fatal = record

    def _on_exit(self) -> None:
        self._process.join(timeout=5)
        code = self._process.exitcode
        reason = f"the engine process ended with exit code {code}"
        if self._fatal is not None:
            reason = self._fatal.message
        elif code == EXIT_RANK_DIED:
            reason = "a tensor-parallel rank died"
        self.abandon(reason)
        self.gone.set_result(reason)


def _write(outbox: "queue.Queue[ToEngine]", pipe: Connection) -> None:
    """A thread, because a pipe to a busy engine may block and the event loop may not."""
    while True:
        try:
            pipe.send_bytes(encode(outbox.get()))
        except OSError:
            log.debug("the engine reads no more")
            return
