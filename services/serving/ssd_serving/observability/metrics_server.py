"""The HTTP server that metrics are scraped from, on a thread. It uses TLS where the service has
certificates, and asks scrapers for theirs where the service asks its callers.

A connection takes no more than a place for some seconds, and the host that has most of them loses
its oldest to the next one: neither the handshake nor the request is waited for on the thread that
accepts.
"""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from ssd_engine.process.sparse_log import SparseLog
from ssd_engine.process.unknown_connections import UnknownConnections
from ssd_serving.files.reloading import Reloading
from ssd_serving.security.tls import TlsFiles, server_context

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 10.0  # a scrape may take so long, from its connection to its end
MAX_SCRAPES = 32  # at a time
MAX_THREADS = 2 * MAX_SCRAPES  # those who lost their place have not ended at once


class MetricsServer(ThreadingWSGIServer):
    daemon_threads = True
    request_queue_size = 128  # connections that are not accepted yet

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: TlsFiles | None,
        on_failure: Callable[[], None],
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_failure``: a changed certificate cannot be used. ``on_refusal``: a handshake
        failed."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._spare = threading.BoundedSemaphore(MAX_THREADS)
        self._places = UnknownConnections(MAX_SCRAPES)
        self._on_refusal, self._refusals = on_refusal, SparseLog()
        self._tls: Reloading[ssl.SSLContext] | None = None
        if tls is not None:
            self._tls = Reloading(tls.paths, lambda: server_context(tls), on_failure)
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
        if self._spare.acquire(blocking=False):
            self._places.enter(client_address[0], request)
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
            self._places.leave(client_address[0], request)
            self._spare.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, ssl.SSLError):
            self._refused(client_address, error)
        log.debug("a scrape of %s failed", client_address[0], exc_info=True)

    def _refused(self, address: tuple[Any, ...], error: ssl.SSLError) -> None:
        self._on_refusal()
        host, port = str(address[0]), address[1]
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = error.reason or type(error).__name__
        about = {"peer": peer, "method": "metrics", "reason": reason}
        text = f"refused {peer}: metrics: the TLS handshake failed: {reason}"
        self._refusals.warning("tls", text, host, about)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def _hang_up(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        log.debug("a scrape ended in time")
