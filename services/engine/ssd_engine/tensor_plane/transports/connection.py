"""The connection beside a plane: a socket whose every wait can be ended from another thread.

It is where an end waits when there is nothing to do, and where it learns that its peer is gone:
the kernel closes a dead process's sockets.
"""

import errno
import os
import select
import socket
import threading
import time

from ssd_engine.tensor_plane.protocol.state import PlaneBroken

STALL_SECONDS = 5.0  # what was begun must end within this


class PlaneThreadStopped(Exception):
    """The owner of this end wants its thread to finish."""


class Wake:
    """Ends the wait of an end's thread, from any other thread."""

    def __init__(self) -> None:
        self.stopped = False
        self._lock = threading.Lock()  # rings that come late must not write to a closed number
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def ring(self) -> None:
        with self._lock:
            if self._writer < 0:
                return
            try:
                os.write(self._writer, b"\0")
            except BlockingIOError:
                return  # full of rings that were not heard yet

    def stop(self) -> None:
        self.stopped = True
        self.ring()

    def wait(self, file: int, events: int, deadline: float | None) -> bool:
        """Until the file is ready (True) or the bell rang; TimeoutError at the deadline."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        poller.register(file, events)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = {number for number, _ in poller.poll(left)}
        if self._reader in ready:
            os.read(self._reader, 4096)
        if self.stopped:
            raise PlaneThreadStopped
        if not ready:
            raise TimeoutError("the peer took too long")
        return file in ready

    def close(self) -> None:
        with self._lock:
            if self._writer >= 0:
                os.close(self._writer)
                os.close(self._reader)
                self._writer = self._reader = -1


class Connection:
    """Bytes to and from the peer. Used by the thread of one end, and closed by it.

    Reads and writes end at their deadline, which is STALL_SECONDS away where none is given.
    """

    def __init__(self, connected: socket.socket, wake: Wake) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._wake = wake

    def close(self) -> None:
        self._socket.close()

    def wait(self) -> bool:
        """Idle: until the peer says something (True) or the bell rings."""
        return self._wake.wait(self._socket.fileno(), select.POLLIN, None)

    def read(self, size: int, deadline: float | None = None) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data), deadline)
        return bytes(data)

    def read_into(self, buffer: memoryview, deadline: float | None = None) -> None:
        deadline = deadline or time.monotonic() + STALL_SECONDS
        while len(buffer):
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                self._wake.wait(self._socket.fileno(), select.POLLIN, deadline)
                continue
            if count == 0:
                raise PlaneBroken("the peer closed the plane")
            buffer = buffer[count:]

    def pending(self, record_bytes: int, most: int = 64) -> bytes:
        """Whole records of this size that have come already; does not wait for a first one."""
        try:
            data = self._socket.recv(most * record_bytes)
        except BlockingIOError:
            return b""
        if not data:
            raise PlaneBroken("the peer closed the plane")
        return data + self.read(-len(data) % record_bytes)

    def write(self, data: bytes | memoryview, deadline: float | None = None) -> None:
        deadline = deadline or time.monotonic() + STALL_SECONDS
        left = memoryview(data)
        while len(left):
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wake.wait(self._socket.fileno(), select.POLLOUT, deadline)

    def send_file(self, file: int) -> None:
        socket.send_fds(self._socket, [b"\0"], [file])

    def receive_file(self) -> int:
        """One open file that the peer hands over; the caller closes it."""
        deadline = time.monotonic() + STALL_SECONDS
        while True:
            try:
                data, files, flags, _ = socket.recv_fds(self._socket, 1, 1)
                break
            except BlockingIOError:
                self._wake.wait(self._socket.fileno(), select.POLLIN, deadline)
        if len(data) == 1 and len(files) == 1 and not flags & socket.MSG_CTRUNC:
            return files[0]
        for file in files:
            os.close(file)
        raise PlaneBroken("the peer handed over no segment")


def accept(listener: socket.socket, wake: Wake, deadline: float) -> Connection:
    while True:
        try:
            return Connection(listener.accept()[0], wake)
        except BlockingIOError:
            wake.wait(listener.fileno(), select.POLLIN, deadline)


def dial(family: int, address: str | tuple[str, int], wake: Wake, deadline: float) -> Connection:
    dialling = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialling.setblocking(False)
        problem = dialling.connect_ex(address)
        if problem == errno.EINPROGRESS:
            while not wake.wait(dialling.fileno(), select.POLLOUT, deadline):
                pass
            problem = dialling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise PlaneBroken(f"the peer cannot be reached: {os.strerror(problem)}")
        return Connection(dialling, wake)
    except BaseException:
        dialling.close()
        raise
