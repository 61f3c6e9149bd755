from ssd.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_EVENT_KIND_UNSPECIFIED: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_FORWARD: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_PREFILL: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_ROUND: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_WAIT: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_DRAFT: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_PUSH: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_LAUNCH: _ClassVar[TraceEventKind]
    TRACE_EVENT_KIND_OUTCOME: _ClassVar[TraceEventKind]

class LookUpResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOK_UP_RESULT_UNSPECIFIED: _ClassVar[LookUpResult]
    LOOK_UP_RESULT_HIT: _ClassVar[LookUpResult]
    LOOK_UP_RESULT_LATE: _ClassVar[LookUpResult]
    LOOK_UP_RESULT_MISS_LENGTH: _ClassVar[LookUpResult]
    LOOK_UP_RESULT_MISS_TOKEN: _ClassVar[LookUpResult]
    LOOK_UP_RESULT_STALE: _ClassVar[LookUpResult]
TRACE_EVENT_KIND_UNSPECIFIED: TraceEventKind
TRACE_EVENT_KIND_FORWARD: TraceEventKind
TRACE_EVENT_KIND_PREFILL: TraceEventKind
TRACE_EVENT_KIND_ROUND: TraceEventKind
TRACE_EVENT_KIND_WAIT: TraceEventKind
TRACE_EVENT_KIND_DRAFT: TraceEventKind
TRACE_EVENT_KIND_PUSH: TraceEventKind
TRACE_EVENT_KIND_LAUNCH: TraceEventKind
TRACE_EVENT_KIND_OUTCOME: TraceEventKind
LOOK_UP_RESULT_UNSPECIFIED: LookUpResult
LOOK_UP_RESULT_HIT: LookUpResult
LOOK_UP_RESULT_LATE: LookUpResult
LOOK_UP_RESULT_MISS_LENGTH: LookUpResult
LOOK_UP_RESULT_MISS_TOKEN: LookUpResult
LOOK_UP_RESULT_STALE: LookUpResult

class GetTraceRequest(_message.Message):
    __slots__ = ("first_event", "max_events")
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    MAX_EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_event: int
    max_events: int
    def __init__(self, first_event: _Optional[int] = ..., max_events: _Optional[int] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("role", "name", "events", "next_event", "lost_events")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_FIELD_NUMBER: _ClassVar[int]
    LOST_EVENTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    events: _containers.RepeatedCompositeFieldContainer[TraceEvent]
    next_event: int
    lost_events: int
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., events: _Optional[_Iterable[_Union[TraceEvent, _Mapping]]] = ..., next_event: _Optional[int] = ..., lost_events: _Optional[int] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("kind", "begin_nanos", "duration_nanos", "sequence", "round", "rows", "tokens", "accepted", "origin", "look_up")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NANOS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NANOS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    LOOK_UP_FIELD_NUMBER: _ClassVar[int]
    kind: TraceEventKind
    begin_nanos: int
    duration_nanos: int
    sequence: int
    round: int
    rows: int
    tokens: int
    accepted: int
    origin: _target_pb2.TokenOrigin
    look_up: LookUpResult
    def __init__(self, kind: _Optional[_Union[TraceEventKind, str]] = ..., begin_nanos: _Optional[int] = ..., duration_nanos: _Optional[int] = ..., sequence: _Optional[int] = ..., round: _Optional[int] = ..., rows: _Optional[int] = ..., tokens: _Optional[int] = ..., accepted: _Optional[int] = ..., origin: _Optional[_Union[_target_pb2.TokenOrigin, str]] = ..., look_up: _Optional[_Union[LookUpResult, str]] = ...) -> None: ...

class GetClockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClockResponse(_message.Message):
    __slots__ = ("clock_nanos",)
    CLOCK_NANOS_FIELD_NUMBER: _ClassVar[int]
    clock_nanos: int
    def __init__(self, clock_nanos: _Optional[int] = ...) -> None: ...
