from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_OFF: _ClassVar[SpeculationMode]
    SPECULATION_MODE_SYNC: _ClassVar[SpeculationMode]
    SPECULATION_MODE_SSD: _ClassVar[SpeculationMode]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_TARGET: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_CACHE: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_JUST_IN_TIME: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_NGRAM: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_SYNC: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_GRAMMAR: _ClassVar[TokenOrigin]

class VerificationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_MODE_UNSPECIFIED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_COUPLED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_REJECTION: _ClassVar[VerificationMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_OFF: SpeculationMode
SPECULATION_MODE_SYNC: SpeculationMode
SPECULATION_MODE_SSD: SpeculationMode
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_TARGET: TokenOrigin
TOKEN_ORIGIN_CACHE: TokenOrigin
TOKEN_ORIGIN_JUST_IN_TIME: TokenOrigin
TOKEN_ORIGIN_NGRAM: TokenOrigin
TOKEN_ORIGIN_SYNC: TokenOrigin
TOKEN_ORIGIN_GRAMMAR: TokenOrigin
VERIFICATION_MODE_UNSPECIFIED: VerificationMode
VERIFICATION_MODE_COUPLED: VerificationMode
VERIFICATION_MODE_REJECTION: VerificationMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "chat", "token_ids", "generated_token_ids", "sampling", "stop", "logprobs", "speculation", "cache_salt", "return_prompt", "output", "grammar")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    chat: ChatPrompt
    token_ids: bytes
    generated_token_ids: bytes
    sampling: SamplingOptions
    stop: StopOptions
    logprobs: LogprobOptions
    speculation: SpeculationOptions
    cache_salt: str
    return_prompt: bool
    output: TextOptions
    grammar: Grammar
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., generated_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stop: _Optional[_Union[StopOptions, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobOptions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., return_prompt: bool = ..., output: _Optional[_Union[TextOptions, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "choices", "context_free")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FREE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choices: Choices
    context_free: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ..., context_free: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TextOptions(_message.Message):
    __slots__ = ("special_tokens",)
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    special_tokens: bool
    def __init__(self, special_tokens: bool = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "template_kwargs", "messages_json", "add_generation_prompt", "continue_final_message", "tools_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_kwargs: _struct_pb2.Struct
    messages_json: bytes
    add_generation_prompt: bool
    continue_final_message: bool
    tools_json: bytes
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., messages_json: _Optional[bytes] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., tools_json: _Optional[bytes] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class StopOptions(_message.Message):
    __slots__ = ("max_tokens", "strings", "token_ids", "ignore_eos", "min_tokens", "include_stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    include_stop: bool
    def __init__(self, max_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., include_stop: bool = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("mode", "verification", "depth", "endpoints", "down_weight")
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    DOWN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationMode
    verification: VerificationMode
    depth: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    down_weight: float
    def __init__(self, mode: _Optional[_Union[SpeculationMode, str]] = ..., verification: _Optional[_Union[VerificationMode, str]] = ..., depth: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., down_weight: _Optional[float] = ...) -> None: ...

class LogprobOptions(_message.Message):
    __slots__ = ("chosen", "top_n", "prompt", "token_bytes")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    chosen: bool
    top_n: int
    prompt: bool
    token_bytes: bool
    def __init__(self, chosen: bool = ..., top_n: _Optional[int] = ..., prompt: bool = ..., token_bytes: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "tokens", "finish", "prompt", "beat")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    started: GenerateStarted
    tokens: GenerateTokens
    finish: GenerateFinish
    prompt: GeneratePrompt
    beat: GenerateBeat
    def __init__(self, started: _Optional[_Union[GenerateStarted, _Mapping]] = ..., tokens: _Optional[_Union[GenerateTokens, _Mapping]] = ..., finish: _Optional[_Union[GenerateFinish, _Mapping]] = ..., prompt: _Optional[_Union[GeneratePrompt, _Mapping]] = ..., beat: _Optional[_Union[GenerateBeat, _Mapping]] = ...) -> None: ...

class GenerateBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GeneratePrompt(_message.Message):
    __slots__ = ("token_ids", "text", "text_lengths", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    text: str
    text_lengths: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, token_ids: _Optional[bytes] = ..., text: _Optional[str] = ..., text_lengths: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class GenerateStarted(_message.Message):
    __slots__ = ("request_id", "seed", "prompt_tokens", "model_fingerprint", "model_digest", "sequence", "beat_millis")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BEAT_MILLIS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    prompt_tokens: int
    model_fingerprint: str
    model_digest: str
    sequence: int
    beat_millis: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., model_digest: _Optional[str] = ..., sequence: _Optional[int] = ..., beat_millis: _Optional[int] = ...) -> None: ...

class GenerateTokens(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "origins", "text_lengths")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    text_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., text_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top", "token")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    token: bytes
    def __init__(self, chosen: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., token: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token: _Optional[bytes] = ...) -> None: ...

class GenerateFinish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "seed", "speculation")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    seed: int
    speculation: SpeculationStats
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("mode", "verification", "rounds", "hits", "late", "length_misses", "token_misses", "cache_rounds", "just_in_time_rounds", "ngram_rounds", "sync_rounds", "plain_rounds", "drafted_tokens", "accepted_tokens", "cache_tokens", "rejected_rounds", "full_rounds", "wait_micros", "rejection_rounds", "cache_round_micros", "other_round_micros", "drafted_per_position", "accepted_per_position", "synthetic_acceptance", "stale", "disconnected", "fallbacks", "grammar_rounds")
    class FallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MISSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MISSES_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    JUST_IN_TIME_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SYNC_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FULL_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MICROS_FIELD_NUMBER: _ClassVar[int]
    REJECTION_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROUND_MICROS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ROUND_MICROS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DISCONNECTED_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationMode
    verification: VerificationMode
    rounds: int
    hits: int
    late: int
    length_misses: int
    token_misses: int
    cache_rounds: int
    just_in_time_rounds: int
    ngram_rounds: int
    sync_rounds: int
    plain_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    cache_tokens: int
    rejected_rounds: int
    full_rounds: int
    wait_micros: int
    rejection_rounds: int
    cache_round_micros: int
    other_round_micros: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    synthetic_acceptance: float
    stale: int
    disconnected: int
    fallbacks: _containers.ScalarMap[str, int]
    grammar_rounds: int
    def __init__(self, mode: _Optional[_Union[SpeculationMode, str]] = ..., verification: _Optional[_Union[VerificationMode, str]] = ..., rounds: _Optional[int] = ..., hits: _Optional[int] = ..., late: _Optional[int] = ..., length_misses: _Optional[int] = ..., token_misses: _Optional[int] = ..., cache_rounds: _Optional[int] = ..., just_in_time_rounds: _Optional[int] = ..., ngram_rounds: _Optional[int] = ..., sync_rounds: _Optional[int] = ..., plain_rounds: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., cache_tokens: _Optional[int] = ..., rejected_rounds: _Optional[int] = ..., full_rounds: _Optional[int] = ..., wait_micros: _Optional[int] = ..., rejection_rounds: _Optional[int] = ..., cache_round_micros: _Optional[int] = ..., other_round_micros: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., synthetic_acceptance: _Optional[float] = ..., stale: _Optional[int] = ..., disconnected: _Optional[int] = ..., fallbacks: _Optional[_Mapping[str, int]] = ..., grammar_rounds: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    max_model_len: int
    def __init__(self, token_ids: _Optional[bytes] = ..., tokens: _Optional[_Iterable[bytes]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "fingerprint", "tokenizer_fingerprint", "architecture", "num_parameters", "vocab_size", "max_model_len", "max_num_seqs", "dtype", "device", "tensor_parallel_size", "num_kv_blocks", "block_size", "eos_token_ids", "has_chat_template", "version", "speculation_modes", "max_speculation_depth", "speculation_endpoints", "load", "synthetic_acceptance", "sampling_defaults", "digest", "chat_format", "draft_inside", "max_request_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_MODES_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATION_DEPTH_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INSIDE_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    device: str
    tensor_parallel_size: int
    num_kv_blocks: int
    block_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    version: str
    speculation_modes: _containers.RepeatedScalarFieldContainer[SpeculationMode]
    max_speculation_depth: int
    speculation_endpoints: _containers.RepeatedCompositeFieldContainer[SpeculationEndpoint]
    load: TargetLoad
    synthetic_acceptance: float
    sampling_defaults: SamplingOptions
    digest: str
    chat_format: ChatFormat
    draft_inside: DraftInside
    max_request_bytes: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: bool = ..., version: _Optional[str] = ..., speculation_modes: _Optional[_Iterable[_Union[SpeculationMode, str]]] = ..., max_speculation_depth: _Optional[int] = ..., speculation_endpoints: _Optional[_Iterable[_Union[SpeculationEndpoint, _Mapping]]] = ..., load: _Optional[_Union[TargetLoad, _Mapping]] = ..., synthetic_acceptance: _Optional[float] = ..., sampling_defaults: _Optional[_Union[SamplingOptions, _Mapping]] = ..., digest: _Optional[str] = ..., chat_format: _Optional[_Union[ChatFormat, _Mapping]] = ..., draft_inside: _Optional[_Union[DraftInside, _Mapping]] = ..., max_request_bytes: _Optional[int] = ...) -> None: ...

class DraftInside(_message.Message):
    __slots__ = ("kind", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChatFormat(_message.Message):
    __slots__ = ("tools", "thinks", "begins_thinking")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    THINKS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_THINKING_FIELD_NUMBER: _ClassVar[int]
    tools: str
    thinks: bool
    begins_thinking: bool
    def __init__(self, tools: _Optional[str] = ..., thinks: bool = ..., begins_thinking: bool = ...) -> None: ...

class TargetLoad(_message.Message):
    __slots__ = ("running", "waiting", "used_kv_blocks", "speculation", "prompt_tokens", "forwards", "forward_micros")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    USED_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MICROS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    used_kv_blocks: int
    speculation: SpeculationStats
    prompt_tokens: int
    forwards: int
    forward_micros: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., used_kv_blocks: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., forwards: _Optional[int] = ..., forward_micros: _Optional[int] = ...) -> None: ...

class SpeculationEndpoint(_message.Message):
    __slots__ = ("address", "state", "draft_name", "reason", "open_sequences", "payoff", "acceptance", "source", "planes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAYOFF_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: str
    draft_name: str
    reason: str
    open_sequences: int
    payoff: str
    acceptance: float
    source: str
    planes: _containers.RepeatedCompositeFieldContainer[TensorPlaneReport]
    def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ..., draft_name: _Optional[str] = ..., reason: _Optional[str] = ..., open_sequences: _Optional[int] = ..., payoff: _Optional[str] = ..., acceptance: _Optional[float] = ..., source: _Optional[str] = ..., planes: _Optional[_Iterable[_Union[TensorPlaneReport, _Mapping]]] = ...) -> None: ...

class TensorPlaneReport(_message.Message):
    __slots__ = ("stream", "kind", "state", "rows", "bytes", "dropped")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    stream: str
    kind: str
    state: str
    rows: int
    bytes: int
    dropped: int
    def __init__(self, stream: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...
