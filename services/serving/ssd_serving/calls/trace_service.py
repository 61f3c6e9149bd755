"""TraceService: the gRPC edge of a trace. Messages are those of whoever serves it."""

import time
from typing import Any

import grpc

from ssd_engine.errors import SSDError
from ssd_engine.tracing.events import TraceEvent, TraceRing
from ssd_serving.rpc.status import abort

SERVICE = "ssd.v1.TraceService"
MOST_EVENTS = 20_000  # in one message: about a megabyte
NANOS = 1_000_000_000


class NotTraced(SSDError):
    """The service was not asked to keep events."""


class TraceServicer:
    def __init__(self, messages: Any, role: str, name: str, ring: TraceRing | None) -> None:
        """``messages``: the module of the protocol's messages. Without a ring nothing is kept."""
        self._pb = messages
        self._role, self._name = role, name
        self._ring = ring

    def handlers(self) -> grpc.GenericRpcHandler:
        pb = self._pb
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetTrace": grpc.unary_unary_rpc_method_handler(
                    self.get_trace,
                    request_deserializer=pb.GetTraceRequest.FromString,
                    response_serializer=pb.GetTraceResponse.SerializeToString,
                ),
                "GetClock": grpc.unary_unary_rpc_method_handler(
                    self.get_clock,
                    request_deserializer=pb.GetClockRequest.FromString,
                    response_serializer=pb.GetClockResponse.SerializeToString,
                ),
            },
        )

    async def get_trace(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if self._ring is None:
            await abort(context, NotTraced("no trace is kept; start with --trace-events 100000"))
        most = min(request.max_events or MOST_EVENTS, MOST_EVENTS)
        events, next_event, lost = self._ring.since(request.first_event, most)
        return self._pb.GetTraceResponse(
            role=self._role,
            name=self._name,
            events=map(self._message, events),
            next_event=next_event,
            lost_events=lost,
        )

    async def get_clock(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The engine's clock, too: the monotonic clock is the host's."""
        return self._pb.GetClockResponse(clock_nanos=time.monotonic_ns())

    def _message(self, event: TraceEvent) -> Any:
        return self._pb.TraceEvent(
            kind=event.kind,
            begin_nanos=int(event.begin * NANOS),
            duration_nanos=int(event.seconds * NANOS),
            sequence=event.sequence,
            round=event.round,
            rows=event.rows,
            tokens=event.tokens,
            accepted=event.accepted,
            origin=event.origin,
            look_up=event.look_up,
        )
