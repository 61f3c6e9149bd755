"""gRPC health of a process that serves nothing else: on a thread, with an event loop of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from grpc_health.v1 import health_pb2

from ssd_serving.calls.health import Health
from ssd_serving.calls.health_server import HealthServer

UP = health_pb2.HealthCheckResponse.SERVING
DOWN = health_pb2.HealthCheckResponse.NOT_SERVING
STOP_SECONDS = 5.0


class Probe:
    """Health that is alive from the first moment, and ready from ``ready`` to ``leaving``."""

    def __init__(self, flag: str, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="probe", daemon=True)
        self._thread.start()
        self._do(self._start(flag, address))

    def ready(self) -> None:
        self._do(self._set(readiness=UP))

    def leaving(self) -> None:
        self._do(self._set(readiness=DOWN))

    def stop(self) -> None:
        self._do(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)

    async def _start(self, flag: str, address: str) -> None:
        self._health = Health()
        await self._set(liveness=UP, readiness=DOWN)
        self._server = HealthServer(self._health)
        self._server.bind(flag, address)
        await self._server.start()

    async def _set(self, **services: int) -> None:
        for name, status in services.items():
            await self._health.set(name, status)
            if name == "readiness":
                await self._health.set("", status)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
