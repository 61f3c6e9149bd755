"""What the front process and the engine process say to each other: small binary records."""

from typing import Any

import msgspec
import numpy as np

from ssd_engine.completion import StopRules
from ssd_engine.sampling_params import Logprobs, SamplingParams


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Vocabulary(Record, frozen=True):
    """First of all: the bytes of each token id, for stop strings."""

    token_bytes: list[bytes]


class Submit(Record, frozen=True):
    sequence: int
    prompt: bytes  # token ids, 4 bytes little-endian each
    generated: bytes
    sampling: SamplingParams
    rules: StopRules
    num_logprobs: int | None


class Cancel(Record, frozen=True):
    sequence: int


class Delta(Record, frozen=True):
    """Tokens that a sequence committed in a step; the last ones when it is finished."""

    sequence: int
    tokens: list[int]
    logprobs: list[Logprobs] | None
    cached_tokens: int
    finished: bool
    error: str | None = None


class Stats(Record, frozen=True):
    running: int
    waiting: int
    used_blocks: int
    reserved_blocks: int
    cached_blocks: int
    prompt_tokens: int  # since start, as the following
    hit_tokens: int
    steps: int


class StepOutput(Record, frozen=True):
    deltas: list[Delta]
    stats: Stats


class Ready(Record, frozen=True):
    num_blocks: int
    load_seconds: float


class Fatal(Record, frozen=True):
    """The engine cannot go on; the message is for the operator."""

    message: str
    bad_config: bool  # the operator's options, not an accident


ToEngine = Vocabulary | Submit | Cancel
ToFront = Ready | StepOutput | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def encode(record: Any) -> bytes:
    return _encoder.encode(record)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_to_front(data: bytes) -> ToFront:
    return _to_front.decode(data)


def pack_tokens(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return tokens
