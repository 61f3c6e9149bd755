"""Health alone on a port of its own, for probes: they have no certificate, and no token."""

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from ssd_engine.errors import ConfigError
from ssd_serving.calls.health import Health
from ssd_serving.calls.refusals import ReportRefusals
from ssd_serving.calls.request_interceptor import ReadRequests
from ssd_serving.rpc.connections import probe_options

MAX_CALLS = 256  # more than may watch and have not sent their request yet


def make_health_server(health: Health, refusals: ReportRefusals | None = None) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=(refusals or ReportRefusals(), ReadRequests()),
        maximum_concurrent_rpcs=MAX_CALLS,
        options=probe_options(),
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def bound(flag: str, address: str, bind: Callable[[str], int]) -> int:
    """The port; raises ConfigError where there is none to have."""
    try:
        port = bind(address)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"{flag}: cannot bind {address} (taken, or not ours)")
    return int(port)
