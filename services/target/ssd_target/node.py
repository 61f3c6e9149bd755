"""Several nodes, as an operator sets them up: the leader's options, and a node that joins it."""

import signal
import sys
from importlib import metadata
from multiprocessing.connection import Connection

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.parallel.cluster.options import ClusterOptions, read_secret
from ssd_engine.parallel.nodes.member import MemberOptions
from ssd_engine.parallel.nodes.member import join as join_leader
from ssd_engine.parallel.nodes.node import Node
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.process.log import setup_logging
from ssd_engine.process.secret_files import warn_of_readers
from ssd_serving.calls.probe import Probe
from ssd_serving.config import check_bounds, parse_address
from ssd_serving.plan import ModelPlan
from ssd_target import __version__
from ssd_target.config import BOUNDS, JoinConfig, TargetConfig

JOIN_BOUNDS = {"threads": (1, 1024), "join_timeout": BOUNDS["join_timeout"], "node": (1, 63)}


def software() -> str:
    """What must be equal on all nodes: they run one model together."""
    return f"ssd {__version__} with torch {metadata.version('torch')}"


def cluster_options(
    config: TargetConfig, plan: ModelPlan, farewell: Connection
) -> ClusterOptions | None:
    """The cluster's options; None where there is one node."""
    if config.cluster_listen is None or config.cluster_secret_file is None:
        return None
    host, port = parse_address("--cluster-listen", config.cluster_listen)
    return ClusterOptions(
        nodes=config.nodes,
        host=host,
        port=port,
        secret=read_secret(config.cluster_secret_file),
        software=software(),
        model=config.model,
        digest=plan.checkpoint.digest,
        join_timeout=config.join_timeout,
        timeout=config.cluster_timeout,
        farewell=farewell,
    )


def check_join(config: JoinConfig) -> MemberOptions:
    """Raise ConfigError for whatever can be known to be wrong without the leader."""
    if config.leader is None:
        raise ConfigError("--leader HOST:PORT is needed")
    if config.node is None:
        raise ConfigError("--node is needed: this node's number, from 1 on")
    if config.cluster_secret_file is None:
        raise ConfigError("--cluster-secret-file FILE is needed")
    check_bounds(config, JOIN_BOUNDS)
    host, port = parse_address("--leader", config.leader)
    if config.health_listen is not None:
        parse_address("--health-listen", config.health_listen)
    if config.kernel_cache is not None and config.kernel_cache.is_file():
        raise ConfigError(f"--kernel-cache: {config.kernel_cache} is a file, not a directory")
    secret = read_secret(config.cluster_secret_file)
    warn_of_readers("--cluster-secret-file", config.cluster_secret_file)
    if config.model is not None:
        resolve_model(config.model)
    return MemberOptions(
        host,
        port,
        config.node,
        secret,
        software(),
        config.join_timeout,
        config.model,
        config.device,
        config.devices,
        config.threads,
        config.kernel_cache,
        config.log_level,
        config.log_format,
    )


def run_join(config: JoinConfig, options: MemberOptions, forks: ForkServer) -> None:
    """Computes until the leader ends; raises SSDError when it does not end on purpose."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    probe = None if config.health_listen is None else Probe("--health-listen", config.health_listen)
    try:
        membership = join_leader(options)
        start = membership.start
        setup_logging(f"target/node{options.node}", start.log_level, log_format=start.log_format)
        if probe is None:
            Node(membership, forks, _nothing, _nothing).run()
        else:
            Node(membership, forks, probe.ready, probe.leaving).run()
    finally:
        if probe is not None:
            probe.stop()


def _nothing() -> None:
    pass
