"""Prometheus metrics of a gateway."""

from prometheus_client import generate_latest

from ssd_gateway.http.connections import REASONS as DROPPED
from ssd_gateway.http.errors import ApiError
from ssd_gateway.targets.pool import TargetPool
from ssd_serving.observability.metrics import ServiceMetrics


class GatewayMetrics(ServiceMetrics):
    def __init__(self, pool: TargetPool) -> None:
        super().__init__("gateway", lambda: None)
        self._requests = self.counter(
            "ssd_gateway_requests",
            "Generations that have ended, and requests that were refused.",
            ["status", "reason"],
        )
        self._running = self.gauge("ssd_gateway_running", "Generations that run.")
        self._tokens = self.counter("ssd_gateway_tokens", "Output tokens that were passed on.")
        self._moves = self.counter(
            "ssd_gateway_moves", "Streams that went on at another target, or there again."
        )
        self._dropped = self.counter_by(
            "ssd_gateway_connections_dropped",
            "Connections that made room for others, or found none.",
            "reason",
            DROPPED,
        )
        self._first = self.histogram(
            "ssd_gateway_first_token_seconds", "From a request to its first token."
        )
        self._whole = self.histogram(
            "ssd_gateway_request_seconds", "From a request to its end, if it was served."
        )
        self.ready.set_function(lambda: float(any(target.ready for target in pool)))
        self.gauge("ssd_gateway_targets", "Targets that are known.").set_function(lambda: len(pool))
        self.gauge("ssd_gateway_targets_ready", "Targets that take requests.").set_function(
            lambda: sum(target.ready for target in pool)
        )

    def began(self) -> None:
        self._running.inc()

    def ended(self, tokens: int, seconds: float, first_seconds: float | None) -> None:
        """An answer was served. ``first_seconds``: until its first token was there."""
        self._requests.labels("200", "served").inc()
        self._tokens.inc(tokens)
        self._whole.observe(seconds)
        if first_seconds is not None:
            self._first.observe(first_seconds)

    def failed(self, problem: ApiError) -> None:
        self._requests.labels(str(problem.status), problem.reason).inc()

    def gone(self) -> None:
        self._requests.labels("499", "gone").inc()

    def left(self, num_moves: int) -> None:
        self._running.dec()
        self._moves.inc(num_moves)

    def dropped(self, reason: str) -> None:
        """A connection, for one of the reasons of http/connections.py."""
        self._dropped.labels(reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
