"""The store on which two ranks find each other, kept on the plane's own connection.

A TCPStore would be a second port that anyone may write to, and its client waits for ever when the
other process is stopped while it connects. Here every wait has the plane's deadline and ends with
the plane, and only the admitted peer can say anything.
"""

import struct
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.transports.connection import Connection

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 64 * 1024
MAX_ENTRIES = 64
_ENTRY = struct.Struct("<II")


class PairStore(dist.Store):
    """What either rank sets, both can get, while the group is made.

    It is kept as long as the group: NCCL's heartbeat goes on looking for a key in it, from a thread
    of its own, and finds none.
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        super().__init__()
        self._connection = connection
        self._deadline = deadline
        self._entries: dict[str, bytes] = {}
        self._ours_ended = self._theirs_ended = False
        self._num_read = 0

    def seal(self) -> None:
        """Both ranks are done with the store: from here on the connection is the plane's again."""
        self._write("", b"")
        self._ours_ended = True
        while not self._theirs_ended:
            self._read_entry()

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else value
        self._write(key, value)
        self._entries[key] = value

    def get(self, key: str) -> bytes:
        while key not in self._entries:
            self._read_entry()
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._entries.pop(key, None) is not None

    def _write(self, key: str, value: bytes) -> None:
        if self._ours_ended:
            raise PlaneBroken("the group uses its store after it was made")
        name = key.encode()
        sizes = _ENTRY.pack(len(name), len(value))
        self._connection.write(sizes + name + value, self._deadline)

    def _read_entry(self) -> None:
        if self._theirs_ended:
            raise PlaneBroken("the peer has made its group without this one")
        key_bytes, value_bytes = _ENTRY.unpack(self._connection.read(_ENTRY.size, self._deadline))
        if key_bytes > MAX_KEY_BYTES or value_bytes > MAX_VALUE_BYTES:
            raise PlaneBroken("the peer's entry in the store is too large")
        self._num_read += 1
        if self._num_read > MAX_ENTRIES:
            raise PlaneBroken("the peer's entries in the store are too many")
        key = self._connection.read(key_bytes, self._deadline).decode(errors="replace")
        self._entries[key] = self._connection.read(value_bytes, self._deadline)
        self._theirs_ended = not key
