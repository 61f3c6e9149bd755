"""Where metrics are scraped: HTTP on a thread, over TLS where a service has certificates.

Nobody who connects can take more than a place for some seconds: neither the handshake nor the
request is waited for on the thread that accepts.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from ssd_engine.serving.reloading import Reloading
from ssd_engine.serving.tls import TlsFiles

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 10.0  # that a scrape may take, from its connection to its end
MAX_SCRAPES = 32  # at a time


class MetricsServer(ThreadingWSGIServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: TlsFiles | None,
        on_failure: Callable[[], None],
    ) -> None:
        """``on_failure``: a changed certificate cannot be used."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MAX_SCRAPES)
        self._tls: Reloading[ssl.SSLContext] | None = None
        if tls is not None:
            load = lambda: _server_context(tls)  # noqa: E731
            self._tls = Reloading([tls.cert, tls.key], load, on_failure)
        super().__init__((host, port), _Quiet)
        self.set_app(make_wsgi_app(registry))

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def get_request(self) -> tuple[Any, Any]:
        """The handshake comes with the first read, on the connection's own thread."""
        connection, address = super().get_request()
        connection.settimeout(SCRAPE_SECONDS)
        if self._tls is not None:
            connection = self._tls.get().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(SCRAPE_SECONDS, _hang_up, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape of %s failed", client_address[0], exc_info=True)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def _hang_up(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        log.debug("a scrape ended in time")


def _server_context(tls: TlsFiles) -> ssl.SSLContext:
    tls.check()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    return context
