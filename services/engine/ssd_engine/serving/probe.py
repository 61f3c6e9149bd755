"""gRPC health alone, for the probes of a process that serves nothing else."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ssd_engine.errors import ConfigError

THREADS = 4
UP = health_pb2.HealthCheckResponse.SERVING
DOWN = health_pb2.HealthCheckResponse.NOT_SERVING


class Probe:
    """Alive from the first moment, ready when told so."""

    def __init__(self, flag: str, address: str) -> None:
        self._health = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(THREADS)
        )
        self._server = grpc.server(ThreadPoolExecutor(THREADS), options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"{flag}: cannot bind {address} (taken, or not ours)")
        self._set(liveness=UP, readiness=DOWN)
        self._server.start()

    def ready(self) -> None:
        self._set(readiness=UP)

    def stop(self) -> None:
        self._server.stop(grace=None)

    def _set(self, **services: int) -> None:
        for name, status in services.items():
            self._health.set(name, status)
            if name == "readiness":
                self._health.set("", status)
