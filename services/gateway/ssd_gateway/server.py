"""The process of a gateway: it listens, serves, and leaves when it is told to."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from pathlib import Path

import uvicorn

from ssd_client.connection.security import Security
from ssd_engine.errors import ConfigError
from ssd_gateway.app import make_app
from ssd_gateway.config import GatewayConfig
from ssd_gateway.gateway import Gateway
from ssd_gateway.http.connections import Connections, most_connections
from ssd_gateway.http.drain import Drain
from ssd_gateway.http.keys import Keys
from ssd_gateway.http.protocol import bounded
from ssd_gateway.metrics import GatewayMetrics
from ssd_gateway.reading.bodies import BodyReader
from ssd_gateway.targets.pool import TargetPool
from ssd_serving.config import is_loopback, parse_address
from ssd_serving.files.descriptors import keep_reserve
from ssd_serving.files.port_file import remove_port, write_port
from ssd_serving.files.reloading import Reloading
from ssd_serving.observability.grpc_log import tame_grpc_log
from ssd_serving.security.tls import TlsFiles, check_ca, check_key_pair, server_context
from ssd_serving.server_security import make_access, tls_files
from ssd_serving.supervisor import Supervisor

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 2.0  # for callers to read how their requests have ended
KEEP_ALIVE = 75  # seconds between requests of one connection
BACKLOG = 1024
RELOAD_SECONDS = 2.0


def target_security(config: GatewayConfig) -> Security:
    """How targets are reached."""
    cert, key, ca = config.target_tls_cert, config.target_tls_key, config.target_tls_ca
    if cert is not None and key is not None:
        check_key_pair("--target-tls-cert", cert, "--target-tls-key", key)
    if ca is not None:
        check_ca("--target-tls-ca", ca)
    return Security(
        tls=config.target_tls or ca is not None or cert is not None,
        ca=None if ca is None else ca.read_bytes(),
        cert=None if cert is None else cert.read_bytes(),
        key=None if key is None else key.read_bytes(),
        token=_read_token(config.target_token_file),
        insecure=config.insecure,
    )


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--target-token-file {path}: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--target-token-file {path}: one line with the token is needed")
    return token


class GatewayServer:
    def __init__(self, config: GatewayConfig) -> None:
        self._config, self._tls = config, tls_files(config)
        self._pool = TargetPool(
            config.target, target_security(config), config.refresh_seconds, config.discover_seconds
        )
        self._metrics = GatewayMetrics(self._pool)
        access = make_access(config, self._metrics)
        host, _ = parse_address("--listen", config.listen)
        guarded = config.token_file is not None or not is_loopback(host) or self._tls is not None
        # Keys that nobody has checked are no better than a token of the gateway's own.
        checked = config.token_file is not None or config.target_token_file is None
        keys = Keys(access, self._pool, guarded, passes_on=config.pass_keys and checked)
        self._drain = Drain(config.drain_timeout)
        self._bodies = BodyReader(config)
        self._gateway = Gateway(config, self._pool, keys, self._metrics, self._drain, self._bodies)

    async def run(self) -> None:
        config = self._config
        tame_grpc_log()  # what targets send
        keep_reserve()
        remove_port(config.port_file)
        listening = self._listen()
        port = listening.getsockname()[1]
        server = self._make_server()
        self._handle_signals(server)
        self._listen_metrics()
        supervisor = Supervisor(self._metrics.task_failed)
        refreshing = supervisor.start("targets", self._pool.run)
        reloading = supervisor.start("certificates", lambda: self._reload_certificates(server))
        try:
            write_port(config.port_file, port)
            scheme = "http" if self._tls is None else "https"
            host = parse_address("--listen", config.listen)[0]
            shown = f"[{host}]" if ":" in host else host
            log.info(
                "listening on %s://%s:%d for %s", scheme, shown, port, ", ".join(config.target)
            )
            await server.serve([listening])
        finally:
            remove_port(config.port_file)
            for task in (refreshing, reloading):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await self._bodies.close()
            await self._pool.close()
        log.info("stopped")

    def _listen(self) -> socket.socket:
        host, port = parse_address("--listen", self._config.listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            raise ConfigError(f"--listen {self._config.listen}: {error.strerror}") from None
        listening.listen(BACKLOG)  # before the port is told
        listening.setblocking(False)
        return listening

    def _make_server(self) -> uvicorn.Server:
        config = self._config
        options = uvicorn.Config(
            make_app(self._gateway),
            http=bounded(
                config.max_header_kib << 10,
                Connections(most_connections(config.max_connections), self._metrics.dropped),
                self._metrics.failed,
                config.read_timeout,
                config.write_timeout,
            ),
            ws="none",
            loop="uvloop",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,  # what had to end has ended before (_Server)
        )
        options.load()
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what it says is said here
        if self._tls is not None:
            options.ssl = server_context(self._tls)
        return _Server(options, self._drain)

    def _handle_signals(self, server: uvicorn.Server) -> None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            if self._drain.begun:
                server.force_exit = True
            self._drain.begin()
            self._metrics.ready.set_function(lambda: 0.0)
            log.info("leaving: requests that run get %g s", self._config.drain_timeout)
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave)

    def _listen_metrics(self) -> None:
        if self._config.metrics_listen is None:
            return
        host, port = parse_address("--metrics-listen", self._config.metrics_listen)
        try:
            port = self._metrics.listen(host, port, self._tls)
        except OSError as error:
            raise ConfigError(f"--metrics-listen: {error}") from None
        scheme = "http" if self._tls is None else "https"
        log.info("metrics on %s://%s:%d/metrics", scheme, host, port)

    async def _reload_certificates(self, server: uvicorn.Server) -> None:
        """New connections are greeted with the files as they are."""
        if self._tls is None:
            return
        files, context = self._tls, server.config.ssl
        failed = self._metrics.reload_failures.labels("tls").inc
        current = Reloading(files.paths, lambda: _checked(files), failed)
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            if current.changed() is not None and isinstance(context, ssl.SSLContext):
                context.load_cert_chain(files.cert, files.key)


def _checked(files: TlsFiles) -> TlsFiles:
    files.check()
    return files


class _Server(uvicorn.Server):
    """Goes on listening while it drains, so that whoever comes is told to go elsewhere."""

    def __init__(self, options: uvicorn.Config, drain: Drain) -> None:
        super().__init__(options)
        self._drain = drain

    async def on_tick(self, counter: int) -> bool:
        leaves = await super().on_tick(counter)
        return leaves and (self.force_exit or self._drain.is_done)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._close_connections()
        for connection in list(self.server_state.connections):
            connection.abort()  # type: ignore[union-attr]
        await super().shutdown(sockets)

    async def _close_connections(self) -> None:
        """Each once its answer is written."""
        while self.server_state.connections:
            for connection in list(self.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals are handled by GatewayServer."""
        yield
