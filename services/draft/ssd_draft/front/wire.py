"""Frames from the wire to plain data and back. Every field that a target sends is checked here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.sampling.params import SamplingParams, check_sampling
from ssd_engine.speculation.frames import (
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
    Source,
    TargetFrame,
    Verification,
)
from ssd_serving.rpc.messages import (
    check_tokens,
    is_newer,
    not_in_vocabulary,
    parse_sampling,
)
from ssd_serving.rpc.plane_messages import encode_answer

MAX_FRAMES = 1024  # frames in one message
FRAMES_BYTES = 4 << 20  # bytes of the frames beside the longest one
MAX_TRACE_CONTEXT = 256  # characters; a traceparent has 55
MAX_ROUND = 2**31 - 1
MAX_UINT32 = 2**32 - 1
ON_THE_WIRE = (Source.NONE, Source.CACHE, Source.JUST_IN_TIME, Source.NGRAM)


@dataclass(frozen=True)
class FrameLimits:
    """The bounds that the frames of a link must keep."""

    vocab_size: int
    max_context: int
    max_depth: int  # tokens of the longest speculation that the target verifies


@dataclass(frozen=True)
class TargetMessage:
    frames: list[TargetFrame]
    refusals: list[DraftFrame]  # notices, of sequences that only a newer draft could follow
    unknown: int = 0  # frames that are left out, or understood in part: newer targets send them


def largest_message(max_context: int) -> int:
    """Bytes of the longest message that a target has to send."""
    return 4 * max_context + FRAMES_BYTES


def decode_target_frames(message: pb.TargetFrames, limits: FrameLimits) -> TargetMessage:
    """All frames of a message; raises InputError for the first field that is wrong."""
    if len(message.frames) > MAX_FRAMES:
        raise InputError("frames.frames", f"at most {MAX_FRAMES}, got {len(message.frames)}")
    newer = [_is_newer(frame) for frame in message.frames]
    frames = [_frame(f"frames.frames[{i}]", f, limits) for i, f in enumerate(message.frames)]
    return TargetMessage(
        [frame for frame in frames if not isinstance(frame, Notice | None)],
        [frame for frame in frames if isinstance(frame, Notice)],
        sum(newer),
    )


def _is_newer(frame: pb.TargetFrame) -> bool:
    """Whether it says something that is not known here."""
    kind = frame.WhichOneof("body")
    if kind == "open":
        return frame.open.verification not in (0, *Verification)
    if kind == "launch":
        return frame.launch.source not in (0, *ON_THE_WIRE)
    return kind is None and is_newer(frame)


def _frame(at: str, frame: pb.TargetFrame, limits: FrameLimits) -> TargetFrame | Notice | None:
    kind = frame.WhichOneof("body")
    if _is_newer(frame) and kind != "launch":
        return None if kind is None else _refusal(frame)
    if kind is None:
        raise InputError(f"{at}.body", "is missing: set open, outcome, launch or close")
    _check_range(f"{at}.round", frame.round, 0, MAX_ROUND)
    return _DECODERS[kind](f"{at}.{kind}", frame, limits)


def _refusal(frame: pb.TargetFrame) -> Notice:
    reason = f"verification {frame.open.verification} is newer than this draft: upgrade the draft"
    return Notice(frame.sequence, frame.round, NoticeKind.REFUSED, reason)


def _open(at: str, frame: pb.TargetFrame, limits: FrameLimits) -> Open:
    body = frame.open
    # A round may reach beyond the context by what it speculates; it is then refused by itself.
    most = limits.max_context + limits.max_depth
    prompt = check_tokens(f"{at}.prompt", body.prompt, most, limits.vocab_size)
    output = check_tokens(f"{at}.output", body.output, most - prompt, limits.vocab_size)
    if not prompt:
        raise InputError(f"{at}.prompt", "is empty: at least one token is needed")
    _check_range(f"{at}.max_tokens", body.max_tokens, prompt + output, MAX_UINT32)
    if not 0 <= body.down_weight <= 1:
        raise InputError(f"{at}.down_weight", f"must be in [0, 1], got {body.down_weight:g}")
    _check_range(f"{at}.depth", body.depth, 0, limits.max_depth)
    return Open(
        sequence=frame.sequence,
        round=frame.round,
        prompt=body.prompt,
        output=body.output,
        speculation=_speculation(f"{at}.speculation", body.speculation, limits),
        max_tokens=body.max_tokens,
        sampling=_sampling(at, body.sampling, limits),
        verification=_verification(f"{at}.verification", body.verification),
        down_weight=body.down_weight,
        depth=body.depth,
        verify_micros=body.verify_micros,
        trace_context=_trace_context(f"{at}.trace_context", body.trace_context),
        cache_scope=body.cache_scope,
    )


def _trace_context(field: str, value: str) -> str:
    """Whoever traces ignores what it cannot read; here it is only kept short."""
    if len(value) > MAX_TRACE_CONTEXT:
        raise InputError(field, f"at most {MAX_TRACE_CONTEXT} characters, got {len(value)}")
    return value


def _outcome(at: str, frame: pb.TargetFrame, limits: FrameLimits) -> Outcome:
    body = frame.outcome
    _check_range(f"{at}.accepted", body.accepted, 0, limits.max_depth)
    if body.token >= limits.vocab_size:
        raise not_in_vocabulary(f"{at}.token", body.token, limits.vocab_size)
    return Outcome(frame.sequence, frame.round, body.accepted, body.token)


def _launch(at: str, frame: pb.TargetFrame, limits: FrameLimits) -> Launch:
    body = frame.launch
    _check_range(f"{at}.depth", body.depth, 0, limits.max_depth)
    if not body.source:
        raise InputError(f"{at}.source", "is missing")
    return Launch(
        sequence=frame.sequence,
        round=frame.round,
        speculation=_speculation(f"{at}.speculation", body.speculation, limits),
        # One that is not known here is, to a draft, as if the target had looked it up itself.
        source=Source(body.source) if body.source in ON_THE_WIRE else Source.NGRAM,
        depth=body.depth,
        verify_micros=body.verify_micros,
    )


def _close(at: str, frame: pb.TargetFrame, limits: FrameLimits) -> Close:
    return Close(frame.sequence, frame.round)


_DECODERS: dict[str, Callable[[str, pb.TargetFrame, FrameLimits], TargetFrame]] = {
    "open": _open,
    "outcome": _outcome,
    "launch": _launch,
    "close": _close,
}


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(field, f"must be in [{low}, {high}], got {value}")


def _speculation(field: str, tokens: Sequence[int], limits: FrameLimits) -> list[int]:
    if len(tokens) > limits.max_depth:
        raise InputError(
            field, f"at most {limits.max_depth} tokens (hello.max_depth), got {len(tokens)}"
        )
    for i, token in enumerate(tokens):
        if token >= limits.vocab_size:
            raise not_in_vocabulary(f"{field}[{i}]", token, limits.vocab_size)
    return list(tokens)


def _sampling(at: str, options: target_pb2.SamplingOptions, limits: FrameLimits) -> SamplingParams:
    if not options.HasField("seed"):
        raise InputError(f"{at}.sampling.seed", "is missing: a draft draws with the target's noise")
    try:
        params = parse_sampling(options)
        check_sampling(params, limits.vocab_size)
    except InputError as error:
        raise InputError(f"{at}.{error.field}", error.problem) from None
    return params


def _verification(field: str, value: int) -> Verification:
    try:
        return Verification(value)
    except ValueError:
        raise InputError(field, f"{value} is neither COUPLED nor REJECTION") from None


def encode_draft_frames(
    epoch: int, frames: Sequence[DraftFrame], load: Load
) -> pb.SpeculateResponse:
    response = pb.SpeculateResponse(
        frames=pb.DraftFrames(
            epoch=epoch,
            load=pb.DraftLoad(open_sequences=load.open_sequences),
        )
    )
    for frame in frames:
        _add(response.frames, frame)
    return response


def _add(message: pb.DraftFrames, frame: DraftFrame) -> None:
    """Adds it in place: a message that is copied into another takes twice the time."""
    if isinstance(frame, Branches):
        wire = message.frames.add(sequence=frame.sequence, round=frame.round)
        wire.branches.SetInParent()
        add = wire.branches.branches.add
        for b in frame.branches:
            add(accepted=b.accepted, token=b.token, start=b.start, tokens=b.tokens)
    elif isinstance(frame, Plane):
        message.frames.add(plane=encode_answer(frame.answer))
    else:
        notice = pb.Notice(kind=pb.NoticeKind.Name(frame.kind), reason=frame.reason)
        message.frames.add(sequence=frame.sequence, round=frame.round, notice=notice)
