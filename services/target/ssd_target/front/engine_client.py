"""The front's side of the engine process: submit, follow, cancel."""

import asyncio
import contextlib
from multiprocessing.connection import Connection
from typing import Any

from ssd_engine.errors import SSDError
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_serving.engine.client import EngineProcess
from ssd_serving.rpc.status import ReaderBehind
from ssd_serving.security.allowances import IdentityAccount
from ssd_target.config import EngineOptions
from ssd_target.front.backlog import Backlog, StreamBeats
from ssd_target.links.links import Links
from ssd_target.records.engine_records import (
    Cancel,
    Delta,
    GiveBackWaiting,
    LinkSend,
    LinkStalled,
    PlaneAbility,
    StepOutput,
    Submit,
    TargetEngineStats,
    decode_to_front,
)

FAREWELL_SECONDS = 5.0


class EngineClient(EngineProcess):
    """Submits sequences to the engine and follows them. Use from one event loop."""

    def __init__(
        self,
        options: EngineOptions,
        max_backlog: int,
        farewell: Connection | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """``max_backlog``: bytes of a sequence that may wait for its client. ``farewell``: the way
        to tell an engine of several nodes to end them, too."""
        super().__init__(
            "ssd_target.engine.engine_process",
            options,
            decode_to_front,
            trace_events=options.trace_events,
            forks=forks,
        )
        self._max_backlog = max_backlog
        self._streams: dict[int, Backlog] = {}
        self._beats = StreamBeats()
        self._accounts: dict[int, IdentityAccount] = {}  # by sequence that was submitted
        # By sequence that is cancelled, and may still take room in the engine.
        self._leaving: dict[int, IdentityAccount] = {}
        self._next_id = 0
        self.stats: TargetEngineStats | None = None
        self.plane_offer: PlaneOffer | None = None
        self.tells_features = False
        self.links: Links | None = None  # where the engine's frames go
        self._farewell = farewell

    def open(self) -> tuple[int, Backlog]:
        """A new sequence id and where its deltas arrive."""
        self.raise_if_stalled()
        self._next_id += 1
        self._streams[self._next_id] = Backlog()
        return self._next_id, self._streams[self._next_id]

    @property
    def num_leaving(self) -> int:
        """Sequences whose requests have ended, and of which the engine has not said so."""
        return len(self._leaving)

    def submit(self, record: Submit, account: IdentityAccount) -> None:
        self._accounts[record.sequence] = account
        self.send(record)

    def close(self, sequence: int, finished: bool) -> None:
        """Forget a sequence; one that is not finished is cancelled. It counts for its identity
        until the engine has let go of it: else whoever cancels at once could send without end."""
        account = self._accounts.pop(sequence, None)
        if self._streams.pop(sequence, None) is None or finished or account is None:
            return
        account.running += 1
        self._leaving[sequence] = account
        self.send(Cancel(sequence))

    def _has_left(self, sequence: int) -> None:
        account = self._leaving.pop(sequence, None)
        if account is not None:
            account.running -= 1

    def drain(self) -> None:
        """What runs goes on; what waits comes back."""
        self.send(GiveBackWaiting())

    async def stop(self) -> None:
        if self._farewell is not None and not self.gone.done():
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            with contextlib.suppress(OSError):  # it is gone this very moment
                self._farewell.send_bytes(b"\0")
            await asyncio.to_thread(self._process.join, FAREWELL_SECONDS)
        await super().stop()

    def end_all(self, error: SSDError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)

    def forget(self) -> None:
        for account in self._leaving.values():
            account.running -= 1
        self._streams.clear()
        self._accounts.clear()
        self._leaving.clear()
        self.stats = None

    @property
    def may_start_again(self) -> bool:
        """Other nodes end with the engine."""
        return self._farewell is None and super().may_start_again

    def _receive(self, record: Any) -> None:
        super()._receive(record)
        self._beats.heard(self._streams.values())

    def dispatch(self, record: StepOutput | LinkSend | LinkStalled | PlaneAbility) -> None:
        match record:
            case LinkSend() if self.links is not None:
                self.links.send(record.link, record.epoch, record.frames)
            case LinkStalled() if self.links is not None:
                self.links.stalled(record.link, record.epoch, record.reason)
            case PlaneAbility():
                self.plane_offer, self.tells_features = record.offer, record.tells_features
            case StepOutput():
                self.stats = record.stats
                self.keep(record.trace)
                for sequence in record.cancelled:
                    self._has_left(sequence)
                for delta in record.deltas:
                    self._deliver(delta)

    def _deliver(self, delta: Delta) -> None:
        stream = self._streams.get(delta.sequence)
        if stream is None:
            return
        stream.put_nowait(delta)
        if stream.size > self._max_backlog and not delta.finished:
            kib = self._max_backlog // 1024
            stream.replace(
                ReaderBehind(f"the client is {kib} KiB of tokens behind (--max-backlog-kib)")
            )
            self.close(delta.sequence, finished=False)
