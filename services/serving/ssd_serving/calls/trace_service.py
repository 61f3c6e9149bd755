"""TraceService: the gRPC edge of a trace."""

import time

import grpc

from ssd.v1 import trace_pb2 as pb
from ssd_engine.errors import SSDError
from ssd_engine.tracing.events import TraceEvent, TraceRing
from ssd_serving.rpc.status import abort

SERVICE = "ssd.v1.TraceService"
MOST_EVENTS = 20_000  # in one message: about a megabyte
NANOS = 1_000_000_000


class NotTraced(SSDError):
    """The service was not asked to keep events."""


class TraceServicer:
    def __init__(self, role: str, name: str, ring: TraceRing | None) -> None:
        """Without a ring nothing is kept."""
        self._role, self._name = role, name
        self._ring = ring

    def handlers(self) -> grpc.GenericRpcHandler:
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

    async def get_trace(
        self, request: pb.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTraceResponse:
        if self._ring is None:
            await abort(context, NotTraced("no trace is kept; start with --trace-events 100000"))
        most = min(request.max_events or MOST_EVENTS, MOST_EVENTS)
        events, next_event, lost = self._ring.since(request.first_event, most)
        return pb.GetTraceResponse(
            role=self._role,
            name=self._name,
            events=map(_message, events),
            next_event=next_event,
            lost_events=lost,
        )

    async def get_clock(
        self, request: pb.GetClockRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetClockResponse:
        """The engine's clock, too: the monotonic clock is the host's."""
        return pb.GetClockResponse(clock_nanos=time.monotonic_ns())


def _message(event: TraceEvent) -> pb.TraceEvent:
    return pb.TraceEvent(
        kind=event.kind,  # type: ignore[arg-type]
        begin_nanos=int(event.begin * NANOS),
        duration_nanos=int(event.seconds * NANOS),
        sequence=event.sequence,
        round=event.round,
        rows=event.rows,
        tokens=event.tokens,
        accepted=event.accepted,
        origin=event.origin,  # type: ignore[arg-type]
        look_up=event.look_up,  # type: ignore[arg-type]
    )
