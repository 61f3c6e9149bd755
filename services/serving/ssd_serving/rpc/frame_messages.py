"""Frames of a link, as messages and as plain data. Each side checks here what the other one sends.

The fields of a frame have the names that they have in its message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import asdict

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.sampling.params import (
    MAX_BANNED_TOKENS,
    OPTION_NAMES,
    SamplingParams,
    check_sampling,
)
from ssd_engine.speculation.frames import (
    Branch,
    Branches,
    Close,
    DraftFrame,
    FeatureRequest,
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
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from ssd_serving.rpc.messages import (
    check_tokens,
    is_newer,
    not_in_vocabulary,
    parse_grammar,
    parse_sampling,
    write_grammar,
)
from ssd_serving.rpc.plane_messages import decode_answer, encode_answer

# What a draft takes from a target.
MAX_TARGET_FRAMES = 1024  # frames in one message
FRAMES_BYTES = 4 << 20  # bytes of the frames beside the longest one
MAX_TRACE_CONTEXT = 256  # characters; a traceparent has 55
MAX_ROUND = 2**31 - 1
MAX_UINT32 = 2**32 - 1
ON_THE_WIRE = (Source.NONE, Source.CACHE, Source.JUST_IN_TIME, Source.NGRAM)

# What a target takes from a draft.
MAX_DRAFT_FRAMES = 4096  # frames in one message
MAX_BRANCHES = 16_384
MAX_TOKENS = 262_144
MAX_ADDRESS = 512  # characters, or bytes of a secret
MAX_REASON = 200  # characters of a notice that are kept
NOTICES = frozenset(NoticeKind)


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


@dataclass(frozen=True)
class DraftMessage:
    frames: list[DraftFrame]
    load: Load | None
    unknown: int = 0  # frames that only a newer draft understands; they are left out


_BODIES = {
    Open: "open",
    Outcome: "outcome",
    Launch: "launch",
    Close: "close",
    Branches: "branches",
    Notice: "notice",
    Plane: "plane",
    FeatureRequest: "features",
}


def encode_target_frames(epoch: int, frames: Sequence[TargetFrame]) -> pb.SpeculateRequest:
    message = pb.SpeculateRequest(frames={"epoch": epoch})
    for frame in frames:
        _add(message.frames.frames, frame)
    return message


def encode_draft_frames(
    epoch: int, frames: Sequence[DraftFrame], load: Load
) -> pb.SpeculateResponse:
    message = pb.SpeculateResponse(frames={"epoch": epoch, "load": asdict(load)})
    for frame in frames:
        _add(message.frames.frames, frame)
    return message


def _add(messages: Any, frame: TargetFrame | DraftFrame) -> None:
    """Adds it in place: a message that is copied into another takes twice the time."""
    body: Any = asdict(frame)
    sequence, number = body.pop("sequence"), body.pop("round")
    if isinstance(frame, Open):
        body["sampling"] = _options(frame.sampling)
        body["banned_token_ids"] = pack_tokens(list(frame.sampling.banned))
        body["banned_until"] = frame.sampling.banned_until
        if frame.sampling.grammar is not None:
            body["grammar"] = write_grammar(frame.sampling.grammar)
    elif isinstance(frame, Branches):
        body["branches"] = map(asdict, frame.branches)
    elif isinstance(frame, Plane):
        body = encode_answer(frame.answer)
    messages.add(sequence=sequence, round=number, **{_BODIES[type(frame)]: body})


def _options(params: SamplingParams) -> dict[str, Any]:
    options = {name: getattr(params, name) for name in ("seed", *OPTION_NAMES)}
    return {**options, "logit_bias": dict(params.logit_bias)}


# What a draft reads


def largest_message(max_context: int) -> int:
    """Bytes of the longest message that a target has to send."""
    return 4 * max_context + FRAMES_BYTES


def decode_target_frames(message: pb.TargetFrames, limits: FrameLimits) -> TargetMessage:
    """All frames of a message; raises InputError for the first field that is wrong."""
    if len(message.frames) > MAX_TARGET_FRAMES:
        problem = f"at most {MAX_TARGET_FRAMES}, got {len(message.frames)}"
        raise InputError("frames.frames", problem)
    newer = [_is_newer(frame) for frame in message.frames]
    frames = [_target_frame(f"frames.frames[{i}]", f, limits) for i, f in enumerate(message.frames)]
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


def _target_frame(
    at: str, frame: pb.TargetFrame, limits: FrameLimits
) -> TargetFrame | Notice | None:
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
        sampling=_drawing(at, body, limits),
        verification=_verification(f"{at}.verification", body.verification),
        down_weight=body.down_weight,
        depth=body.depth,
        verify_micros=body.verify_micros,
        trace_context=_trace_context(f"{at}.trace_context", body.trace_context),
        cache_scope=body.cache_scope,
    )


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


def _drawing(at: str, body: pb.Open, limits: FrameLimits) -> SamplingParams:
    """How the target draws, bans and grammar included."""
    params = _with_bans(at, body, _sampling(at, body.sampling, limits), limits)
    return replace(params, grammar=parse_grammar(body.grammar, f"{at}.grammar"))


def _with_bans(
    at: str, body: pb.Open, params: SamplingParams, limits: FrameLimits
) -> SamplingParams:
    """Some token is left; nothing is drafted beyond the context."""
    field, banned = f"{at}.banned_token_ids", body.banned_token_ids
    most = min(MAX_BANNED_TOKENS, limits.vocab_size - 1)
    if len(banned) > 4 * most:
        raise InputError(field, f"at most {most} tokens, got {len(banned) // 4}")
    if not check_tokens(field, banned, most, limits.vocab_size):
        return params
    until = min(body.banned_until, limits.max_context)
    return replace(params, banned=tuple(unpack_tokens(banned)), banned_until=until)


def _verification(field: str, value: int) -> Verification:
    try:
        return Verification(value)
    except ValueError:
        raise InputError(field, f"{value} is neither COUPLED nor REJECTION") from None


def _trace_context(field: str, value: str) -> str:
    """Whoever traces ignores what it cannot read; here it is only kept short."""
    if len(value) > MAX_TRACE_CONTEXT:
        raise InputError(field, f"at most {MAX_TRACE_CONTEXT} characters, got {len(value)}")
    return value


# What a target reads


def decode_draft_frames(message: pb.DraftFrames) -> DraftMessage:
    """All frames of a message; raises InputError for one that no honest draft sends."""
    if len(message.frames) > MAX_DRAFT_FRAMES:
        raise InputError("frames", f"at most {MAX_DRAFT_FRAMES}, got {len(message.frames)}")
    branches = sum(len(frame.branches.branches) for frame in message.frames)
    if branches > MAX_BRANCHES:
        raise InputError("branches", f"at most {MAX_BRANCHES} in a message, got {branches}")
    if message.ByteSize() > MAX_TOKENS:  # a token takes a byte at least
        tokens = sum(len(b.tokens) for frame in message.frames for b in frame.branches.branches)
        if tokens > MAX_TOKENS:
            raise InputError("tokens", f"at most {MAX_TOKENS} in a message, got {tokens}")
    frames = [known for frame in message.frames if (known := _draft_frame(frame)) is not None]
    load = Load(message.load.open_sequences) if message.HasField("load") else None
    return DraftMessage(frames, load, unknown=len(message.frames) - len(frames))


def _draft_frame(frame: pb.DraftFrame) -> DraftFrame | None:
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
    if kind == "features":
        return FeatureRequest(frame.sequence, frame.round, frame.features.from_position)
    if is_newer(frame):
        return None
    raise InputError("body", "is missing: branches, a notice, a plane or features")


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
