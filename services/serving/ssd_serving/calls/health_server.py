"""Health alone on a port of its own, for probes: they have no certificate, and no token."""

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from ssd_engine.errors import ConfigError
from ssd_serving.calls.health import Health
from ssd_serving.calls.health_port import HealthPort
from ssd_serving.calls.refusals import ReportRefusals
from ssd_serving.calls.request_interceptor import ReadRequests
from ssd_serving.rpc.connections import probe_options
from ssd_serving.supervisor import Supervisor

MAX_CALLS = 256  # more than may watch and have not sent their request yet


class HealthServer:
    def __init__(
        self,
        health: Health,
        refusals: ReportRefusals | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._port = HealthPort(supervisor or Supervisor())
        self._server = grpc.aio.server(
            interceptors=(refusals or ReportRefusals(), ReadRequests()),
            maximum_concurrent_rpcs=MAX_CALLS,
            options=probe_options(),
        )
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        self._server.add_insecure_port(self._port.inside)

    def bind(self, flag: str, address: str) -> int:
        """Returns the port; raises ConfigError where there is none to have."""
        return bound(flag, address, self._port.bind)

    async def start(self) -> None:
        await self._server.start()
        self._port.start()

    async def stop(self) -> None:
        self._port.stop()
        await self._server.stop(grace=None)


def bound(flag: str, address: str, bind: Callable[[str], int]) -> int:
    """The port; raises ConfigError where there is none to have."""
    try:
        port = bind(address)
    except (RuntimeError, OSError):
        port = 0
    if not port:
        raise ConfigError(f"{flag}: cannot bind {address} (taken, or not ours)")
    return int(port)
