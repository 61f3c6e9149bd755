"""An OpenTelemetry collector in this process: a real OTLP service that keeps what it is sent."""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

from tests.waiting import wait_until


@dataclass(frozen=True)
class Received:
    service: str
    name: str
    trace: str
    span: str
    parent: str
    events: tuple[str, ...]
    about: dict[str, Any]
    failed: bool


class Collector(rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Received] = []

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        found = [
            _received(_values(resource.resource.attributes)["service.name"], span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self._spans = [*self._spans, *found]  # one at a time: the server has one thread
        return pb.ExportTraceServiceResponse()

    def wait_for(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        return wait_until(
            lambda: spans if enough(spans := self._spans) else None, lambda: self._spans
        )


def _received(service: str, span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple(event.name for event in span.events),
        _values(span.attributes),
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
