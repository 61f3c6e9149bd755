"""grpc.health.v1 for any number of services and watchers.

The library's own forgets all watchers of a name when one of them leaves, so that anybody could keep
others from hearing of a drain; and it takes as many as come.
"""

import asyncio

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from ssd_engine.errors import SSDError
from ssd_serving.rpc.status import ServerFull, abort
from ssd_serving.rpc.streams import write_in_time

MAX_WATCHERS = 64
WRITE_SECONDS = 60.0
RETRY_SECONDS = 5.0


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # set by the next change, which then makes another one
        self._watchers = 0

    async def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """A call of its own for as long as the client likes: so there is a bound."""
        self._watchers += 1
        try:
            if self._watchers > MAX_WATCHERS:
                raise ServerFull(f"at most {MAX_WATCHERS} may watch at a time", RETRY_SECONDS)
            await self._follow(request.service, context)
        except SSDError as error:
            await abort(context, error)
        finally:
            self._watchers -= 1

    async def _follow(self, service: str, context: grpc.aio.ServicerContext) -> None:
        said = None
        while True:
            changed = self._changed
            status = self._statuses.get(service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != said:
                response = pb.HealthCheckResponse(status=status)
                await write_in_time(context, response, WRITE_SECONDS)
                said = status
            await changed.wait()
