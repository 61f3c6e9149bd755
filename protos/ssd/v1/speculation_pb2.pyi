from ssd.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculatorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATOR_KIND_UNSPECIFIED: _ClassVar[SpeculatorKind]
    SPECULATOR_KIND_MODEL: _ClassVar[SpeculatorKind]
    SPECULATOR_KIND_NGRAM: _ClassVar[SpeculatorKind]
    SPECULATOR_KIND_HEAD: _ClassVar[SpeculatorKind]

class TensorPlaneDirection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_PLANE_DIRECTION_UNSPECIFIED: _ClassVar[TensorPlaneDirection]
    TENSOR_PLANE_DIRECTION_TO_TARGET: _ClassVar[TensorPlaneDirection]
    TENSOR_PLANE_DIRECTION_TO_DRAFT: _ClassVar[TensorPlaneDirection]

class TensorPlaneKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_PLANE_KIND_UNSPECIFIED: _ClassVar[TensorPlaneKind]
    TENSOR_PLANE_KIND_SHARED_MEMORY: _ClassVar[TensorPlaneKind]
    TENSOR_PLANE_KIND_GLOO: _ClassVar[TensorPlaneKind]
    TENSOR_PLANE_KIND_NCCL: _ClassVar[TensorPlaneKind]
    TENSOR_PLANE_KIND_TCP: _ClassVar[TensorPlaneKind]

class SpeculationSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_SOURCE_UNSPECIFIED: _ClassVar[SpeculationSource]
    SPECULATION_SOURCE_NONE: _ClassVar[SpeculationSource]
    SPECULATION_SOURCE_CACHE: _ClassVar[SpeculationSource]
    SPECULATION_SOURCE_JUST_IN_TIME: _ClassVar[SpeculationSource]
    SPECULATION_SOURCE_NGRAM: _ClassVar[SpeculationSource]

class NoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTICE_KIND_UNSPECIFIED: _ClassVar[NoticeKind]
    NOTICE_KIND_LOST: _ClassVar[NoticeKind]
    NOTICE_KIND_BUSY: _ClassVar[NoticeKind]
    NOTICE_KIND_REFUSED: _ClassVar[NoticeKind]
    NOTICE_KIND_LEAVING: _ClassVar[NoticeKind]
SPECULATOR_KIND_UNSPECIFIED: SpeculatorKind
SPECULATOR_KIND_MODEL: SpeculatorKind
SPECULATOR_KIND_NGRAM: SpeculatorKind
SPECULATOR_KIND_HEAD: SpeculatorKind
TENSOR_PLANE_DIRECTION_UNSPECIFIED: TensorPlaneDirection
TENSOR_PLANE_DIRECTION_TO_TARGET: TensorPlaneDirection
TENSOR_PLANE_DIRECTION_TO_DRAFT: TensorPlaneDirection
TENSOR_PLANE_KIND_UNSPECIFIED: TensorPlaneKind
TENSOR_PLANE_KIND_SHARED_MEMORY: TensorPlaneKind
TENSOR_PLANE_KIND_GLOO: TensorPlaneKind
TENSOR_PLANE_KIND_NCCL: TensorPlaneKind
TENSOR_PLANE_KIND_TCP: TensorPlaneKind
SPECULATION_SOURCE_UNSPECIFIED: SpeculationSource
SPECULATION_SOURCE_NONE: SpeculationSource
SPECULATION_SOURCE_CACHE: SpeculationSource
SPECULATION_SOURCE_JUST_IN_TIME: SpeculationSource
SPECULATION_SOURCE_NGRAM: SpeculationSource
NOTICE_KIND_UNSPECIFIED: NoticeKind
NOTICE_KIND_LOST: NoticeKind
NOTICE_KIND_BUSY: NoticeKind
NOTICE_KIND_REFUSED: NoticeKind
NOTICE_KIND_LEAVING: NoticeKind

class SpeculateRequest(_message.Message):
    __slots__ = ("hello", "frames")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    frames: TargetFrames
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., frames: _Optional[_Union[TargetFrames, _Mapping]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("welcome", "frames")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frames: DraftFrames
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frames: _Optional[_Union[DraftFrames, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "oldest_protocol_version", "epoch", "target_name", "tokenizer_fingerprint", "vocab_size", "max_depth", "tensor_plane", "features")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PLANE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    oldest_protocol_version: int
    epoch: int
    target_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_depth: int
    tensor_plane: TensorPlaneOffer
    features: FeatureOffer
    def __init__(self, protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., target_name: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_depth: _Optional[int] = ..., tensor_plane: _Optional[_Union[TensorPlaneOffer, _Mapping]] = ..., features: _Optional[_Union[FeatureOffer, _Mapping]] = ...) -> None: ...

class FeatureOffer(_message.Message):
    __slots__ = ("hidden_size", "num_layers", "dtype", "plane")
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    hidden_size: int
    num_layers: int
    dtype: str
    plane: TensorPlaneOffer
    def __init__(self, hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., dtype: _Optional[str] = ..., plane: _Optional[_Union[TensorPlaneOffer, _Mapping]] = ...) -> None: ...

class FeatureTerms(_message.Message):
    __slots__ = ("boundaries", "hidden_size", "dtype", "window")
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    dtype: str
    window: int
    def __init__(self, boundaries: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "epoch", "draft_name", "speculator", "max_sequences", "max_context", "max_depth", "max_branches", "features")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NAME_FIELD_NUMBER: _ClassVar[int]
    SPECULATOR_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    draft_name: str
    speculator: SpeculatorKind
    max_sequences: int
    max_context: int
    max_depth: int
    max_branches: int
    features: FeatureTerms
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., draft_name: _Optional[str] = ..., speculator: _Optional[_Union[SpeculatorKind, str]] = ..., max_sequences: _Optional[int] = ..., max_context: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_branches: _Optional[int] = ..., features: _Optional[_Union[FeatureTerms, _Mapping]] = ...) -> None: ...

class TensorPlaneOffer(_message.Message):
    __slots__ = ("kinds", "host_id", "device_id", "streams")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[TensorPlaneKind]
    host_id: str
    device_id: str
    streams: _containers.RepeatedCompositeFieldContainer[TensorPlaneStream]
    def __init__(self, kinds: _Optional[_Iterable[_Union[TensorPlaneKind, str]]] = ..., host_id: _Optional[str] = ..., device_id: _Optional[str] = ..., streams: _Optional[_Iterable[_Union[TensorPlaneStream, _Mapping]]] = ...) -> None: ...

class TensorPlaneAnswer(_message.Message):
    __slots__ = ("kind", "address", "secret", "stream")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    kind: TensorPlaneKind
    address: str
    secret: bytes
    stream: TensorPlaneStream
    def __init__(self, kind: _Optional[_Union[TensorPlaneKind, str]] = ..., address: _Optional[str] = ..., secret: _Optional[bytes] = ..., stream: _Optional[_Union[TensorPlaneStream, _Mapping]] = ...) -> None: ...

class TensorPlaneStream(_message.Message):
    __slots__ = ("name", "direction", "width", "dtype", "max_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    direction: TensorPlaneDirection
    width: int
    dtype: str
    max_rows: int
    def __init__(self, name: _Optional[str] = ..., direction: _Optional[_Union[TensorPlaneDirection, str]] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., max_rows: _Optional[int] = ...) -> None: ...

class TargetFrames(_message.Message):
    __slots__ = ("epoch", "frames")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frames: _containers.RepeatedCompositeFieldContainer[TargetFrame]
    def __init__(self, epoch: _Optional[int] = ..., frames: _Optional[_Iterable[_Union[TargetFrame, _Mapping]]] = ...) -> None: ...

class TargetFrame(_message.Message):
    __slots__ = ("sequence", "round", "open", "outcome", "launch", "close")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    open: Open
    outcome: Outcome
    launch: Launch
    close: Close
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., launch: _Optional[_Union[Launch, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("prompt", "output", "speculation", "max_tokens", "sampling", "verification", "down_weight", "depth", "verify_micros", "trace_context", "cache_scope", "banned_token_ids", "banned_until", "grammar")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    DOWN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MICROS_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    prompt: bytes
    output: bytes
    speculation: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: _target_pb2.SamplingOptions
    verification: _target_pb2.VerificationMode
    down_weight: float
    depth: int
    verify_micros: int
    trace_context: str
    cache_scope: int
    banned_token_ids: bytes
    banned_until: int
    grammar: _target_pb2.Grammar
    def __init__(self, prompt: _Optional[bytes] = ..., output: _Optional[bytes] = ..., speculation: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_target_pb2.SamplingOptions, _Mapping]] = ..., verification: _Optional[_Union[_target_pb2.VerificationMode, str]] = ..., down_weight: _Optional[float] = ..., depth: _Optional[int] = ..., verify_micros: _Optional[int] = ..., trace_context: _Optional[str] = ..., cache_scope: _Optional[int] = ..., banned_token_ids: _Optional[bytes] = ..., banned_until: _Optional[int] = ..., grammar: _Optional[_Union[_target_pb2.Grammar, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("accepted", "token")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    token: int
    def __init__(self, accepted: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class Launch(_message.Message):
    __slots__ = ("speculation", "source", "depth", "verify_micros")
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MICROS_FIELD_NUMBER: _ClassVar[int]
    speculation: _containers.RepeatedScalarFieldContainer[int]
    source: SpeculationSource
    depth: int
    verify_micros: int
    def __init__(self, speculation: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[SpeculationSource, str]] = ..., depth: _Optional[int] = ..., verify_micros: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftFrames(_message.Message):
    __slots__ = ("epoch", "frames", "load")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frames: _containers.RepeatedCompositeFieldContainer[DraftFrame]
    load: DraftLoad
    def __init__(self, epoch: _Optional[int] = ..., frames: _Optional[_Iterable[_Union[DraftFrame, _Mapping]]] = ..., load: _Optional[_Union[DraftLoad, _Mapping]] = ...) -> None: ...

class DraftFrame(_message.Message):
    __slots__ = ("sequence", "round", "branches", "notice", "plane", "features")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    branches: Branches
    notice: Notice
    plane: TensorPlaneAnswer
    features: FeatureRequest
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., branches: _Optional[_Union[Branches, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., plane: _Optional[_Union[TensorPlaneAnswer, _Mapping]] = ..., features: _Optional[_Union[FeatureRequest, _Mapping]] = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("from_position",)
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    from_position: int
    def __init__(self, from_position: _Optional[int] = ...) -> None: ...

class Branches(_message.Message):
    __slots__ = ("branches",)
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("accepted", "token", "start", "tokens")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    token: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, accepted: _Optional[int] = ..., token: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: NoticeKind
    reason: str
    def __init__(self, kind: _Optional[_Union[NoticeKind, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DraftLoad(_message.Message):
    __slots__ = ("step_micros", "just_in_time_micros", "open_sequences")
    STEP_MICROS_FIELD_NUMBER: _ClassVar[int]
    JUST_IN_TIME_MICROS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    step_micros: int
    just_in_time_micros: int
    open_sequences: int
    def __init__(self, step_micros: _Optional[int] = ..., just_in_time_micros: _Optional[int] = ..., open_sequences: _Optional[int] = ...) -> None: ...

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("name", "speculator", "fingerprint", "tokenizer_fingerprint", "architecture", "num_parameters", "vocab_size", "max_context", "max_sequences", "max_depth", "max_branches", "dtype", "device", "num_kv_blocks", "block_size", "protocol_version", "version", "links", "open_sequences", "features", "planes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPECULATOR_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    name: str
    speculator: SpeculatorKind
    fingerprint: str
    tokenizer_fingerprint: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_context: int
    max_sequences: int
    max_depth: int
    max_branches: int
    dtype: str
    device: str
    num_kv_blocks: int
    block_size: int
    protocol_version: int
    version: str
    links: int
    open_sequences: int
    features: FeatureTerms
    planes: _containers.RepeatedCompositeFieldContainer[_target_pb2.TensorPlaneReport]
    def __init__(self, name: _Optional[str] = ..., speculator: _Optional[_Union[SpeculatorKind, str]] = ..., fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_branches: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., num_kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., links: _Optional[int] = ..., open_sequences: _Optional[int] = ..., features: _Optional[_Union[FeatureTerms, _Mapping]] = ..., planes: _Optional[_Iterable[_Union[_target_pb2.TensorPlaneReport, _Mapping]]] = ...) -> None: ...
