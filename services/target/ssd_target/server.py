"""The life of a target: check, listen, load, serve, drain."""

import asyncio
import hashlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoint import Checkpoint, open_checkpoint
from ssd_engine.config import ModelConfig, load_model_config
from ssd_engine.errors import ConfigError
from ssd_engine.model_store import resolve_model
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.tokenizer import Tokenizer
from ssd_target import __version__
from ssd_target.config import (
    EngineOptions,
    TargetConfig,
    check_config,
    parse_address,
    runner_options,
)
from ssd_target.engine_client import EngineClient
from ssd_target.metrics import Metrics
from ssd_target.records import Ready
from ssd_target.requests import Limits
from ssd_target.service import SERVICE, Serving, TargetServicer

log = logging.getLogger(__name__)

SPARE_CALLS = 128  # health checks, and requests on their way to being refused
LIVENESS, READINESS = "liveness", "readiness"
UP = health_pb2.HealthCheckResponse.SERVING
DOWN = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Plan:
    """A configuration that was checked against its model, before anything is loaded."""

    config: TargetConfig
    name: str
    model: ModelConfig
    checkpoint: Checkpoint
    runner: RunnerOptions


def plan_target(config: TargetConfig) -> Plan:
    """Raise SSDError for whatever can be known to be wrong without loading weights."""
    check_config(config)
    directory = resolve_model(config.model)
    model = load_model_config(directory)
    return Plan(
        config=config,
        name=config.name or directory.name,
        model=model,
        checkpoint=open_checkpoint(directory, model),
        runner=runner_options(config, model, directory),
    )


class TargetServer:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        self._engine = EngineClient(_engine_options(plan))
        self._num_blocks = 0
        self._metrics = Metrics(lambda: self._engine.stats, lambda: self._num_blocks)
        self._servicer = TargetServicer(self._metrics, plan.config.write_timeout)
        self._health = health.aio.HealthServicer()
        self._stop = asyncio.Event()
        self._drain_timeout = plan.config.drain_timeout

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or the death of the engine; the latter raises SSDError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        _remove_port(self._config.port_file)  # of an earlier run
        server = self._make_server()
        port = self._bind(server)
        self._listen_metrics()
        self._engine.start()
        try:
            await server.start()
            await self._set_health(READINESS, DOWN)
            await self._set_health(LIVENESS, UP)
            _write_port(self._config.port_file, port)
            log.info("listening on %s:%d", parse_address("", self._config.listen)[0], port)
            if await self._load():
                await self._serve()
                await self._drain()
            if not self._stop.is_set():
                self._engine.raise_if_gone()
        finally:
            _remove_port(self._config.port_file)
            await server.stop(grace=0.5)
            await self._engine.stop()

    def _interrupt(self) -> None:
        """Ctrl-C drains; a second one does not wait for that."""
        if self._stop.is_set():
            self._drain_timeout = 0.0
        self._stop.set()

    def _make_server(self) -> grpc.aio.Server:
        size = self._config.max_message_mib * 1024 * 1024
        keepalive = int(self._config.keepalive_seconds * 1000)
        config = self._config
        server = grpc.aio.server(
            # Admission refuses politely; this bounds what is held before admission is asked.
            maximum_concurrent_rpcs=config.max_num_seqs + config.max_waiting + SPARE_CALLS,
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.keepalive_time_ms", keepalive),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
            ],
        )
        server.add_generic_rpc_handlers((self._servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            from grpc_reflection.v1alpha import reflection

            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            port = server.add_insecure_port(self._config.listen)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"--listen: cannot bind {self._config.listen} (taken, or not ours)")
        return int(port)

    def _listen_metrics(self) -> None:
        if self._config.metrics_listen is None:
            return
        host, port = parse_address("--metrics-listen", self._config.metrics_listen)
        try:
            port = self._metrics.listen(host, port)
        except OSError as error:
            raise ConfigError(f"--metrics-listen: {error}") from None
        log.info("metrics on http://%s:%d/metrics", host, port)

    async def _load(self) -> bool:
        """Tokenizer here, weights there, at the same time. False when told to stop meanwhile."""
        plan = self._plan
        tokenizer = await asyncio.to_thread(Tokenizer, plan.runner.directory, plan.model)
        self._engine.send_vocabulary(tokenizer.token_bytes)
        await self._first_of(self._engine.ready)
        if not self._engine.ready.done():
            return False
        ready = self._engine.ready.result()
        self._num_blocks = ready.num_blocks
        self._servicer.serving = self._serving(tokenizer, ready)
        await self._set_health(READINESS, UP)
        log.info(
            "ready: %s, %.1fM parameters, %s on %s, %d KV blocks of %d tokens, loaded in %.1f s",
            plan.name,
            plan.checkpoint.num_parameters / 1e6,
            plan.runner.dtype,
            plan.runner.device,
            ready.num_blocks,
            plan.runner.block_size,
            ready.load_seconds,
        )
        return True

    def _serving(self, tokenizer: Tokenizer, ready: Ready) -> Serving:
        plan = self._plan
        return Serving(
            engine=self._engine,
            tokenizer=tokenizer,
            limits=Limits(
                vocab_size=plan.model.vocab_size,
                max_model_len=plan.runner.max_model_len,
                kv_tokens=ready.num_blocks * plan.runner.block_size,
                eos_token_ids=plan.model.eos_token_ids,
            ),
            info=_model_info(plan, tokenizer, ready),
            max_live=self._config.max_num_seqs + self._config.max_waiting,
            max_num_seqs=self._config.max_num_seqs,
        )

    async def _serve(self) -> None:
        await self._first_of(self._engine.gone)

    async def _first_of(self, future: "asyncio.Future[Any]") -> None:
        """Return when the future is done, the engine is gone, or a signal came."""
        stop = asyncio.ensure_future(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {future, self._engine.gone, stop}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _drain(self) -> None:
        """Refuse what is new, finish what runs, within the time that the operator gives."""
        self._servicer.draining = True
        await self._set_health(READINESS, DOWN)
        if self._engine.gone.done():
            return
        active = self._servicer.num_active
        log.info("draining: %d requests are running", active)
        begin = time.monotonic()
        while active and time.monotonic() - begin < self._drain_timeout:
            if self._engine.gone.done():
                return
            await asyncio.sleep(0.02)
            active = self._servicer.num_active
        if active:
            log.warning("drain timeout: %d requests are cut off", active)
            self._engine.abandon("the server stops; resume on another endpoint")
        else:
            log.info("drained")

    async def _set_health(self, name: str, status: int) -> None:
        """Readiness is also the answer for the service by name and for the server as a whole."""
        names = (READINESS, SERVICE, "") if name == READINESS else (name,)
        for each in names:
            await self._health.set(each, status)


def _engine_options(plan: Plan) -> EngineOptions:
    return EngineOptions(
        model=plan.model,
        runner=plan.runner,
        tp=plan.config.tp,
        prefill_chunk=plan.config.prefill_chunk,
        log_level=plan.config.log_level,
        check_integrity=plan.config.check_integrity,
    )


def _model_info(plan: Plan, tokenizer: Tokenizer, ready: Ready) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        name=plan.name,
        fingerprint=_fingerprint(plan, tokenizer),
        tokenizer_fingerprint=tokenizer.fingerprint,
        architecture=plan.model.architecture,
        num_parameters=plan.checkpoint.num_parameters,
        vocab_size=plan.model.vocab_size,
        max_model_len=plan.runner.max_model_len,
        max_num_seqs=plan.config.max_num_seqs,
        dtype=plan.runner.dtype,
        device=plan.runner.device,
        tensor_parallel_size=plan.config.tp,
        num_kv_blocks=ready.num_blocks,
        block_size=plan.runner.block_size,
        eos_token_ids=plan.model.eos_token_ids,
        has_chat_template=tokenizer.has_chat_template,
        version=__version__,
    )


def _fingerprint(plan: Plan, tokenizer: Tokenizer) -> str:
    """Equal for servers on which one request has one text, up to the order of additions."""
    parts = (plan.checkpoint.fingerprint, tokenizer.text_fingerprint, plan.model, plan.runner.dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _remove_port(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def _write_port(path: Path | None, port: int) -> None:
    """Whole or not at all: a reader never sees half a number."""
    if path is None:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)
