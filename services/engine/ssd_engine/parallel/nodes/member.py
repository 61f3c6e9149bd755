"""A node that joins a leader: dial, prove the secret, hold the set-up against what is here.

No torch here: only the ranks that are started later need it.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError, SSDError
from ssd_engine.execution.runner_options import parse_devices
from ssd_engine.parallel.cluster.setup import Application, Setup, decode, encode
from ssd_engine.parallel.cluster.wire import (
    HANDSHAKE,
    NodeConnection,
    NodeConnectionBroken,
    NodeFrameKind,
    as_reason,
)
from ssd_engine.parallel.ranks.rank_start import RankPlacement, RankStart
from ssd_engine.process.secret_handshake import UnknownPeer, WrongSecret

log = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
ANSWER_SECONDS = 15.0  # for the leader to answer what needs no work
PAUSE_SECONDS, LONGEST_PAUSE = 0.2, 2.0


class NoLeader(SSDError):
    """No leader answered at the address in time."""


@dataclass(frozen=True)
class MemberOptions:
    """What an operator sets at a node; all else comes from the leader."""

    host: str
    port: int
    node: int
    secret: bytes = field(repr=False)
    software: str
    join_timeout: float
    model: str | None = None  # None: as the leader's operator named it
    device: str = "auto"
    devices: str | None = None
    threads: int | None = None
    kernel_cache: Path | None = None
    log_level: str | None = None
    log_format: str = "text"


@dataclass(frozen=True)
class Membership:
    connection: NodeConnection
    start: RankStart
    timeout: float  # seconds of silence until the leader is lost


def join(options: MemberOptions) -> Membership:
    """Raises ConfigError when the leader or this node refuses, NoLeader when there is none."""
    deadline = time.monotonic() + options.join_timeout
    pause, told = PAUSE_SECONDS, ""
    while True:
        try:
            return _attempt(options)
        except (UnknownPeer, NodeConnectionBroken, OSError) as error:
            reason = str(error)
        if reason != told:
            log.info("no leader at %s:%d yet: %s", options.host, options.port, reason)
            told = reason
        if time.monotonic() + pause > deadline:
            raise NoLeader(
                f"no leader at {options.host}:{options.port} within --join-timeout "
                f"{options.join_timeout:g} s: {reason}"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _attempt(options: MemberOptions) -> Membership:
    """One connection, by a name that is looked up anew."""
    connected = socket.create_connection((options.host, options.port), timeout=DIAL_SECONDS)
    connection = NodeConnection(connected)
    try:
        _greet(connection, options)
        setup = _apply(connection, options)
        with _telling(connection):
            start = _fit(setup, options, connection.local_host)
        connection.send(NodeFrameKind.FIT)
        _answer(connection, NodeFrameKind.ADMITTED)
    except BaseException:
        connection.close()
        raise
    log.info("node %d has joined: ranks %s", options.node, _span(start.place))
    return Membership(connection, start, setup.timeout)


def _greet(connection: NodeConnection, options: MemberOptions) -> None:
    try:
        HANDSHAKE.enter(connection, options.secret, time.monotonic() + ANSWER_SECONDS)
    except WrongSecret as error:
        raise ConfigError(f"--cluster-secret-file: {error}") from None


def _apply(connection: NodeConnection, options: MemberOptions) -> Setup:
    connection.send(NodeFrameKind.APPLY, encode(Application(options.node, options.software)))
    return decode(Setup, _answer(connection, NodeFrameKind.SETUP))


def _answer(connection: NodeConnection, kind: NodeFrameKind) -> bytes:
    found, payload = connection.receive(time.monotonic() + ANSWER_SECONDS)
    if found is NodeFrameKind.REFUSED:
        raise ConfigError(f"refused by the leader: {as_reason(payload)}")
    if found is not kind:
        raise NodeConnectionBroken(f"{kind.name} was expected, {found.name} came")
    return payload


@contextmanager
def _telling(connection: NodeConnection) -> Iterator[None]:
    """What this node finds to be wrong is said on both sides."""
    try:
        yield
    except SSDError as error:
        connection.part(NodeFrameKind.FAILED, str(error).encode())
        raise


def _fit(setup: Setup, options: MemberOptions, host: str) -> RankStart:
    """What this node's ranks start with; raises SSDError when it cannot be what the leader has."""
    if options.device not in ("auto", setup.options.device):
        raise ConfigError(
            f"--device {options.device}: the leader runs on {setup.options.device}, and so must "
            "every node"
        )
    name = options.model or setup.model
    directory = resolve_model(name)
    config = load_model_config(directory)
    if config != setup.config:
        raise ConfigError(f"--model: {name} has another config.json than the leader's")
    if open_checkpoint(directory, config).digest != setup.digest:
        raise ConfigError(f"--model: {name} is another checkpoint than the leader's")
    here = setup.tp // setup.nodes
    return RankStart(
        config,
        replace(
            setup.options,
            directory=directory,
            devices=parse_devices(options.devices, setup.options.device, here),
            threads=options.threads or setup.options.threads,
            kernel_cache=options.kernel_cache,
        ),
        RankPlacement(setup.tp, options.node * here, here, host),
        setup.role,
        options.log_level or setup.log_level,
        options.log_format,
    )


def _span(place: RankPlacement) -> str:
    ranks = place.ranks
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
