"""Frames of a link, from plain data to the wire and back. What a draft sends is checked here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.sampling.params import OPTION_NAMES, SamplingParams
from ssd_engine.speculation.frames import (
    Branch,
    Branches,
    Close,
    DraftFrame,
    Launch,
    Load,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Plane,
    TargetFrame,
)
from ssd_serving.rpc.messages import is_newer
from ssd_serving.rpc.plane_messages import decode_answer

MAX_FRAMES = 4096  # frames in one message
MAX_BRANCHES = 16_384
MAX_TOKENS = 262_144
MAX_ADDRESS = 512  # characters, or bytes of a secret
MAX_REASON = 200  # characters of a notice that are kept
NOTICES = frozenset(NoticeKind)


def encode_target_frames(epoch: int, frames: Sequence[TargetFrame]) -> pb.SpeculateRequest:
    message = pb.SpeculateRequest()
    message.frames.epoch = epoch
    for frame in frames:
        _ENCODERS[type(frame)](message.frames.frames.add(), frame)
    return message


def _name(wire: pb.TargetFrame, frame: TargetFrame) -> None:
    wire.sequence, wire.round = frame.sequence, frame.round


def _open(wire: pb.TargetFrame, frame: Open) -> None:
    _name(wire, frame)
    body = wire.open
    body.prompt, body.output = frame.prompt, frame.output
    body.speculation.extend(frame.speculation)
    body.max_tokens = frame.max_tokens
    body.sampling.CopyFrom(sampling_options(frame.sampling))
    body.verification = int(frame.verification)  # type: ignore[assignment]
    body.down_weight, body.depth = frame.down_weight, frame.depth
    body.verify_micros = frame.verify_micros
    body.cache_scope = frame.cache_scope
    if frame.trace_context:
        body.trace_context = frame.trace_context


def sampling_options(params: SamplingParams) -> target_pb2.SamplingOptions:
    options: dict[str, Any] = {name: getattr(params, name) for name in ("seed", *OPTION_NAMES)}
    return target_pb2.SamplingOptions(**options, logit_bias=dict(params.logit_bias))


def _outcome(wire: pb.TargetFrame, frame: Outcome) -> None:
    _name(wire, frame)
    wire.outcome.accepted, wire.outcome.token = frame.accepted, frame.token
    wire.outcome.SetInParent()


def _launch(wire: pb.TargetFrame, frame: Launch) -> None:
    _name(wire, frame)
    body = wire.launch
    body.speculation.extend(frame.speculation)
    body.source = int(frame.source)  # type: ignore[assignment]
    body.depth, body.verify_micros = frame.depth, frame.verify_micros


def _close(wire: pb.TargetFrame, frame: Close) -> None:
    _name(wire, frame)
    wire.close.SetInParent()


_ENCODERS: dict[type, Callable[[pb.TargetFrame, Any], None]] = {
    Open: _open,
    Outcome: _outcome,
    Launch: _launch,
    Close: _close,
}


@dataclass(frozen=True)
class DraftMessage:
    frames: list[DraftFrame]
    load: Load | None
    unknown: int = 0  # frames that only a newer draft understands; they are left out


def decode_draft_frames(message: pb.DraftFrames) -> DraftMessage:
    """All frames of a message; raises InputError for one that no honest draft sends."""
    if len(message.frames) > MAX_FRAMES:
        raise InputError("frames", f"at most {MAX_FRAMES}, got {len(message.frames)}")
    branches = sum(len(frame.branches.branches) for frame in message.frames)
    if branches > MAX_BRANCHES:
        raise InputError("branches", f"at most {MAX_BRANCHES} in a message, got {branches}")
    if message.ByteSize() > MAX_TOKENS:  # a token takes a byte at least
        tokens = sum(len(b.tokens) for frame in message.frames for b in frame.branches.branches)
        if tokens > MAX_TOKENS:
            raise InputError("tokens", f"at most {MAX_TOKENS} in a message, got {tokens}")
    frames = [known for frame in message.frames if (known := _frame(frame)) is not None]
    load = _load(message.load) if message.HasField("load") else None
    return DraftMessage(frames, load, unknown=len(message.frames) - len(frames))


def _frame(frame: pb.DraftFrame) -> DraftFrame | None:
    """None: of a kind that is not known here."""
    kind = frame.WhichOneof("body")
    if kind == "branches":
        return Branches(
            frame.sequence,
            frame.round,
            [Branch(b.accepted, b.token, b.start, b.tokens[:]) for b in frame.branches.branches],
        )
    if kind == "notice":
        return _notice(frame)
    if kind == "plane":
        return _plane(frame.plane)
    if is_newer(frame):
        return None
    raise InputError("body", "is missing: branches, a notice or a plane")


def _notice(frame: pb.DraftFrame) -> Notice | None:
    kind = frame.notice.kind
    if not kind:
        raise InputError("notice.kind", "is missing")
    if kind not in NOTICES:
        return None
    return Notice(frame.sequence, frame.round, NoticeKind(kind), frame.notice.reason[:MAX_REASON])


def _plane(answer: pb.TensorPlaneAnswer) -> Plane | None:
    if len(answer.address) > MAX_ADDRESS or len(answer.secret) > MAX_ADDRESS:
        raise InputError("plane", "is longer than any address or secret")
    known = decode_answer(answer)
    return None if known is None else Plane(0, 0, known)


def _load(load: pb.DraftLoad) -> Load:
    return Load(load.open_sequences)
