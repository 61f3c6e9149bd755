"""The store on which ranks of several nodes find each other, kept in the leader's memory.

A TCPStore would be a second port, open to anyone. Here a rank asks its node's process over a pipe,
which asks the leader over its authenticated connection. Every request is answered at once; whoever
waits for a key asks again. NCCL goes on asking while it lives, from a thread of its own.
"""

import enum
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from ssd_engine.parallel.cluster.wire import READY, NodeConnectionBroken

MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 1 << 18
ASK_AGAIN_SECONDS = 0.005
WAIT_SECONDS = 1800.0  # for a key, where the caller gives no time: weights may take long to load
ABSENT, PRESENT = b"\0", b"\1"
_REQUEST = struct.Struct("<BI")  # operation, bytes of the key; the value follows
_NUMBER = struct.Struct("<q")


class Operation(enum.IntEnum):
    SET = 1
    GET = 2
    CHECK = 3
    ADD = 4
    DELETE = 5


def serve_request(store: dist.Store, request: bytes) -> bytes:
    """The leader's answer; raises Broken for what is no request."""
    if len(request) < _REQUEST.size:
        raise NodeConnectionBroken("a request to the store is too short")
    number, size = _REQUEST.unpack_from(request)
    value = request[_REQUEST.size + size :]
    if size > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
        raise NodeConnectionBroken("a request to the store is too large")
    key = request[_REQUEST.size : _REQUEST.size + size].decode(errors="replace")
    match number:
        case Operation.SET:
            store.set(key, value)  # type: ignore[arg-type]  # the stubs know of no bytes
            return PRESENT
        case Operation.GET:
            return PRESENT + store.get(key) if store.check([key]) else ABSENT
        case Operation.CHECK:
            return PRESENT if store.check([key]) else ABSENT
        case Operation.ADD if len(value) == _NUMBER.size:
            return _NUMBER.pack(store.add(key, _NUMBER.unpack(value)[0]))
        case Operation.DELETE:
            return PRESENT if store.delete_key(key) else ABSENT
    raise NodeConnectionBroken(f"a request to the store of kind {number} makes no sense")


class NodeStore(dist.Store):
    """A rank's view of the leader's store."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe
        self._lock = threading.Lock()
        self._wait_seconds = WAIT_SECONDS

    def tell_ready(self) -> None:
        with self._lock:
            self._pipe.send_bytes(READY)

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait_seconds = timeout.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(Operation.SET, key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._wait_seconds
        while (answer := self._ask(Operation.GET, key)) == ABSENT:
            self._pause(key, deadline)
        return answer[1:]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._wait_seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        for key in keys:
            while not self.check([key]):
                self._pause(key, deadline)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(Operation.CHECK, key) == PRESENT for key in keys)

    def add(self, key: str, value: int) -> int:
        return _NUMBER.unpack(self._ask(Operation.ADD, key, _NUMBER.pack(value)))[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(Operation.DELETE, key) == PRESENT

    def _ask(self, operation: Operation, key: str, value: bytes = b"") -> bytes:
        name = key.encode()
        with self._lock:
            self._pipe.send_bytes(_REQUEST.pack(operation, len(name)) + name + value)
            return self._pipe.recv_bytes()

    def _pause(self, key: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no other rank set {key} in time")
        time.sleep(ASK_AGAIN_SECONDS)
