"""The interface of every kind of plane: how rows get across once its two ends have met.

Both halves run in the thread of their end. Anything they raise breaks the plane.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssd_engine.tensor_plane.protocol.records import Announcement
from ssd_engine.tensor_plane.transports.connection import Connection, Wake
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms
from ssd_engine.tensor_plane.transports.staging import Staging


@dataclass(frozen=True)
class Meeting:
    """An admitted connection, and what a kind needs to start on it."""

    connection: Connection
    wake: Wake
    terms: PlaneTerms
    staging: Staging
    deadline: float  # for having started


class RowsOut(Protocol):
    def push(self, announcement: Announcement, rows: Tensor) -> None:
        """Announce the rows and send them on their way; at most WINDOW sends are on theirs."""

    def release(self, serial: int) -> None:
        """The peer has dealt with this send."""

    def close(self) -> None: ...


class RowsIn(Protocol):
    at_once: int  # announcements that may be read before the rows of the first

    def fetch(self, announcements: Sequence[Announcement]) -> None:
        """These were announced together; each is then taken or skipped, in their order. The counts
        have been checked."""

    def take(self, announcement: Announcement) -> Tensor:
        """[num_rows, width] on the engine's device."""

    def skip(self, announcement: Announcement) -> None:
        """Nobody wants these rows."""

    def close(self) -> None: ...
