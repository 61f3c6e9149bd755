"""What leader and node tell each other before there are ranks. Plain data, no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.parallel.cluster.wire import NodeConnectionBroken

Message = TypeVar("Message")


@dataclass(frozen=True)
class Application:
    node: int
    software: str


@dataclass(frozen=True)
class Setup:
    """Everything that a node runs by; its paths are the leader's."""

    model: str  # as the leader's operator named it
    digest: str  # the checkpoint's
    config: ModelConfig
    options: RunnerOptions
    tp: int
    nodes: int
    role: str
    log_level: str
    timeout: float


def encode(message: Application | Setup) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=str)  # a Path


def decode(kind: type[Message], data: bytes) -> Message:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_path)
    except msgspec.MsgspecError as error:
        raise NodeConnectionBroken(f"{kind.__name__} cannot be read: {error}") from None


def _path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{kind} from {value!r}")
