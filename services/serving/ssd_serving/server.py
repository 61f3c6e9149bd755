"""The life of a service: listen, load, serve, drain."""

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import click
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ssd_engine.errors import ConfigError, SSDError
from ssd_engine.process.children import settle_memory
from ssd_serving.calls.connection_room import ConnectionRoom
from ssd_serving.calls.health import Health
from ssd_serving.calls.health_server import HealthServer, bound
from ssd_serving.calls.refusals import REASONS, ReportRefusals, methods_of
from ssd_serving.calls.request_interceptor import ReadRequests
from ssd_serving.calls.trace_service import SERVICE as TRACES
from ssd_serving.calls.trace_service import TraceServicer
from ssd_serving.config import (
    ServiceConfig,
    is_loopback,
    knows_callers,
    max_message_bytes,
    parse_address,
)
from ssd_serving.daemon_thread import in_daemon_thread
from ssd_serving.engine.client import EngineProcess
from ssd_serving.engine.records import Ready
from ssd_serving.engine.restarts import Restarts
from ssd_serving.engine.watch import EngineState, EngineWatch
from ssd_serving.files.descriptors import keep_reserve
from ssd_serving.files.port_file import remove_port, write_port
from ssd_serving.observability.grpc_log import tame_grpc_log
from ssd_serving.observability.metrics import ServiceMetrics
from ssd_serving.observability.telemetry import Spans
from ssd_serving.plan import ModelPlan
from ssd_serving.preflight import check_here
from ssd_serving.rpc.connections import connection_options, most_connections
from ssd_serving.security.access import Access, Guard
from ssd_serving.security.tls import server_credentials
from ssd_serving.server_security import tls_files
from ssd_serving.supervisor import Supervisor

log = logging.getLogger(__name__)

Value = TypeVar("Value")

END_SECONDS = 1.0  # for statuses of the last calls to get out
LOOK_SECONDS = 1.0  # between two looks at gRPC's server
SPARE_CALLS = 128  # health checks, and calls on their way to being refused
LIVENESS, READINESS = "liveness", "readiness"
UP = health_pb2.HealthCheckResponse.SERVING
DOWN = health_pb2.HealthCheckResponse.NOT_SERVING


_SAID = {
    EngineState.MOVING: "the engine goes on",
    EngineState.STALLED: "the engine stands still",
    EngineState.DEAD: "the engine still stands still: it is taken for dead",
}


class Servicer(Protocol):
    """A gRPC service, as the server that runs it sees it."""

    draining: bool  # new calls are refused

    @property
    def num_active(self) -> int:
        """What a drain waits for."""

    def handlers(self) -> grpc.GenericRpcHandler: ...


class ServiceServer(ABC):
    role: str
    service: str  # full name of the gRPC service
    active: str  # what the servicer counts, for the log

    def __init__(
        self,
        config: ServiceConfig,
        engine: EngineProcess,
        servicer: Servicer,
        metrics: ServiceMetrics,
        access: Access,
        max_calls: int,
        max_request_bytes: int,
        spans: Spans,
        name: str,
        supervisor: Supervisor,
    ) -> None:
        """``max_calls``: live calls that the service has a use for. ``max_request_bytes``: of the
        longest message that it can make use of. ``name``: of what is served, for traces."""
        self._supervisor = supervisor
        self._restarts = Restarts(config.engine_restarts)
        self._engine_state = EngineState.MOVING  # that callers and probes were told
        self._spans = spans
        self._traces = TraceServicer(self.role, name, engine.trace)
        self._service_config = config
        self._access = access
        self._tls = tls_files(config)
        self._engine_process = engine
        self._service_calls = servicer
        self._service_metrics = metrics
        self._max_calls, self._max_request_bytes = max_calls, max_request_bytes
        self._health = Health()
        self._stop = asyncio.Event()
        self._background: list[asyncio.Future[Any]] = []
        self._drain_timeout = config.drain_timeout
        self._refusals = self._make_refusals()
        self._connections_closed = metrics.counter(
            "ssd_connections_closed", "Idle connections that made room for others."
        )

    @abstractmethod
    def prepare(self) -> None:
        """What the front does while the engine loads the model."""

    @abstractmethod
    def open(self, ready: Ready) -> list[str]:
        """From now on calls are served; returns what was loaded, for the log: first of all its
        name."""

    @abstractmethod
    async def engine_lost(self) -> None:
        """The engine has ended, and is about to be started again."""

    @abstractmethod
    def cut_off(self) -> None:
        """The drain's time is over: end what is still active."""

    @abstractmethod
    async def close(self) -> None:
        """No call is served any more: say farewell to others."""

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. The end of the engine, or of gRPC's server, raises
        SSDError."""
        keep_reserve()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        remove_port(self._service_config.port_file)  # left by an earlier run
        server = self._make_server()
        port = self._bind(server)
        health_server = self._make_health_server()
        self._listen_metrics()
        self._say_what_is_open()
        self._engine_process.start()
        room = self._supervisor.start("connection_room", self._connection_room(port).watch)
        try:
            await server.start()
            if health_server is not None:
                await health_server.start()
            await self._set_health(READINESS, DOWN)
            await self._set_health(LIVENESS, UP)
            write_port(self._service_config.port_file, port)
            log.info("listening on %s:%d", parse_address("", self._service_config.listen)[0], port)
            if await self._load():
                deaf = asyncio.ensure_future(_until_ended(server))
                await self._watch_until(deaf)
                while self._may_go_on(deaf) and (number := self._restarts.take()):
                    if await self._start_again(number):
                        await self._watch_until(deaf)
                await self._drain()
                if deaf.done() and not self._stop.is_set():
                    raise SSDError("the service ends: gRPC accepts no calls any more")
                deaf.cancel()
            if not self._stop.is_set():
                self._engine_process.raise_if_gone()
        finally:
            room.cancel()
            remove_port(self._service_config.port_file)
            # Connections are told, too: who holds an idle one connects elsewhere.
            await server.stop(grace=END_SECONDS)
            if health_server is not None:
                await health_server.stop()
            await self.close()
            await self._engine_process.stop()
            await asyncio.to_thread(self._spans.stop)
            _ignore(loop, signal.SIGTERM)

    def _interrupt(self) -> None:
        """Ctrl-C drains; a second one does not wait for that."""
        if self._stop.is_set():
            self._drain_timeout = 0.0
        self._stop.set()

    def _make_server(self) -> grpc.aio.Server:
        tame_grpc_log()
        server = grpc.aio.server(
            interceptors=(self._refusals, Guard(self._access), ReadRequests(self._caller)),
            # Admission refuses politely; this bounds what is held before admission is asked.
            maximum_concurrent_rpcs=self._max_calls + SPARE_CALLS,
            options=[
                # A stream whose client never takes its end stays in the connection that it came by.
                ("grpc.max_concurrent_streams", 2 * (self._max_calls + SPARE_CALLS)),
                # All that have not been read yet may be in memory at once.
                ("grpc.max_receive_message_length", self._max_request_bytes),
                ("grpc.max_send_message_length", max_message_bytes(self._service_config)),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                *connection_options(self._service_config.keepalive_seconds),
            ],
        )
        server.add_generic_rpc_handlers((self._service_calls.handlers(), self._traces.handlers()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._service_config.reflection:
            from grpc_reflection.v1alpha import reflection

            names = (self.service, TRACES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    def _make_refusals(self) -> ReportRefusals:
        """What can be counted is shown from the start."""
        counter = self._service_metrics.refusals
        for method in methods_of((self.service, TRACES, health.SERVICE_NAME)):
            for reason in REASONS:
                counter.labels(method, reason)
        return ReportRefusals(
            self._access.name_of, lambda method, reason: counter.labels(method, reason).inc()
        )

    def _caller(self, context: grpc.aio.ServicerContext) -> str:
        return self._access.identity(context).name

    def _bind(self, server: grpc.aio.Server) -> int:
        address = self._service_config.listen
        if self._tls is None:
            return bound("--listen", address, server.add_insecure_port)
        failed = self._service_metrics.reload_failures.labels("tls").inc
        credentials = server_credentials(self._tls, failed)
        return bound("--listen", address, lambda at: server.add_secure_port(at, credentials))

    def _connection_room(self, port: int) -> ConnectionRoom:
        return ConnectionRoom(port, most_connections(), self._connections_closed.inc)

    def _make_health_server(self) -> HealthServer | None:
        """It says up or down to whoever asks without a certificate."""
        address = self._service_config.health_listen
        if address is None:
            return None
        server = HealthServer(self._health, self._refusals, self._supervisor)
        port = server.bind("--health-listen", address)
        log.info("health on %s:%d", parse_address("", address)[0], port)
        return server

    def _say_what_is_open(self) -> None:
        host, _ = parse_address("", self._service_config.listen)
        if is_loopback(host):
            return
        if not knows_callers(self._service_config):
            log.warning("--insecure: whoever reaches %s can use this service", host)
        elif self._tls is None:
            log.warning("no TLS: tokens and texts travel in the clear to %s", host)

    def _listen_metrics(self) -> None:
        if self._service_config.metrics_listen is None:
            return
        host, port = parse_address("--metrics-listen", self._service_config.metrics_listen)
        try:
            port = self._service_metrics.listen(host, port, self._tls)
        except OSError as error:
            raise ConfigError(f"--metrics-listen: {error}") from None
        scheme = "http" if self._tls is None else "https"
        log.info("metrics on %s://%s:%d/metrics", scheme, host, port)

    async def _load(self) -> bool:
        """Loads the front's part and the engine's at once; False when told to stop meanwhile."""
        self.prepare()
        await self._first_of(self._engine_process.ready)
        if not self._engine_process.ready.done():
            if self._stop.is_set():
                log.info("told to stop while loading")
            return False
        ready = self._engine_process.ready.result()
        for work in self._background:
            await self._first_of(work)
            if not work.done():
                return False
        settle_memory()
        loaded = self.open(ready)
        self._engine_process.stalled = None
        await self._set_health(READINESS, UP)
        log.info("ready: %s, loaded in %.1f s", loaded[0], ready.load_seconds)
        for line in loaded[1:]:
            log.info("  %s", line)
        return True

    def in_background(self, work: Callable[[], Value]) -> "asyncio.Future[Value]":
        """Runs what may take as long as loading does. A stop does not wait for it."""
        future = in_daemon_thread(work, "background")
        self._background.append(future)
        return future

    async def _watch_until(self, deaf: "asyncio.Future[None]") -> None:
        watching = self._supervisor.start("engine_watch", self._watch_engine)
        await self._first_of(deaf)
        watching.cancel()

    def _may_go_on(self, deaf: "asyncio.Future[None]") -> bool:
        """True if nothing but the engine has ended, and it may be started again."""
        return (
            not deaf.done()
            and not self._stop.is_set()
            and self._engine_process.gone.done()
            and self._engine_process.may_start_again
        )

    async def _start_again(self, number: int) -> bool:
        """Starts the engine once more behind this front; False where it has ended meanwhile, or
        when told to stop."""
        engine = self._engine_process
        reason, most = engine.gone.result(), self._service_config.engine_restarts
        log.error("%s; it is started again, %d of %d times", reason, number, most)
        engine.stalled = f"{reason}; it is started again"
        await self._set_health(READINESS, DOWN)
        await self.engine_lost()
        await engine.end_engine()
        engine.start()
        return await self._load()

    async def _watch_engine(self) -> None:
        """An engine that stands still serves nobody: callers are told so, and may go elsewhere. It
        may go on; after twice the time it is taken for dead, and whoever looks after processes may
        start another one."""
        engine, watch = self._engine_process, EngineWatch(self._service_config.engine_timeout)
        while True:
            await asyncio.sleep(watch.interval)
            now = watch.look(engine.silent_seconds)
            if now is self._engine_state:
                continue
            log.log(logging.INFO if now is EngineState.MOVING else logging.ERROR, _SAID[now])
            if now is EngineState.STALLED:
                engine.stalled = f"{_SAID[now]} (--engine-timeout)"
                engine.abandon(engine.stalled)
            elif now is EngineState.MOVING:
                engine.stalled = None
            await self._set_health(READINESS, UP if now is EngineState.MOVING else DOWN)
            await self._set_health(LIVENESS, DOWN if now is EngineState.DEAD else UP)
            self._engine_state = now

    async def _first_of(self, future: "asyncio.Future[Any]") -> None:
        """Return when the future is done, the engine is gone, or a signal came."""
        stop = asyncio.ensure_future(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {future, self._engine_process.gone, stop}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _drain(self) -> None:
        """Refuse what is new, finish what runs, within the time that the operator gives."""
        self._service_calls.draining = True
        self._engine_process.drain()
        await self._set_health(READINESS, DOWN)
        if self._engine_process.gone.done():
            return
        active = self._service_calls.num_active
        log.info("draining: %d %s", active, self.active)
        begin = time.monotonic()
        while active and time.monotonic() - begin < self._drain_timeout:
            if self._engine_process.gone.done():
                return
            await asyncio.sleep(0.02)
            active = self._service_calls.num_active
        if active:
            log.warning("drain timeout: %d %s are cut off", active, self.active)
            self.cut_off()
        else:
            log.info("drained")

    async def _set_health(self, name: str, status: int) -> None:
        """Readiness is also the answer for the service by name and for the server as a whole."""
        names = (READINESS, self.service, "") if name == READINESS else (name,)
        if name == READINESS:
            self._service_metrics.ready.set(status == UP)
        for each in names:
            await self._health.set(each, status)


def check_or_serve(
    check_only: bool,
    config: ServiceConfig,
    plan: ModelPlan | None,
    planned: object,
    make_server: Callable[[], ServiceServer],
) -> None:
    """With --check-config, looks whether what is planned could be served here; else serves it."""
    if check_only:
        check_here(config, plan, config.local_ranks)
        click.echo(f"ok: {planned}")
        return

    async def run() -> None:
        await make_server().run()

    asyncio.run(run())


async def _until_ended(server: grpc.aio.Server) -> None:
    """gRPC stops a server whose own loop has failed. It says so in the log alone, and whoever holds
    a call open keeps the server from being seen as terminated."""
    while server._server.is_running():
        await asyncio.sleep(LOOK_SECONDS)


def _ignore(loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    """The end is near, and its exit code is 0: one more signal does not change it."""
    loop.remove_signal_handler(number)
    signal.signal(number, signal.SIG_IGN)
