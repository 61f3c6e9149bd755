"""Frames on the wire: what is sound arrives as it was sent, what is not is refused by field."""

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import (
    Branch,
    Branches,
    Close,
    Launch,
    Load,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Plane,
    Source,
    Verification,
)
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from ssd_serving.rpc.frame_messages import (
    MAX_TARGET_FRAMES,
    DraftMessage,
    FrameLimits,
    decode_draft_frames,
    decode_target_frames,
    encode_draft_frames,
    encode_target_frames,
)
from tests.suite.scale import share

LIMITS = FrameLimits(vocab_size=1000, max_context=64, max_depth=8)
SEED = 2**64 - 1


def sound() -> pb.TargetFrames:
    """One frame of each kind."""
    opened = pb.Open(
        prompt=pack_tokens([1, 2, 999]),
        output=pack_tokens([4]),
        speculation=[5, 6],
        max_tokens=40,
        sampling=target_pb2.SamplingOptions(
            temperature=0.5, top_k=9, logit_bias={7: 2.5}, seed=SEED
        ),
        verification=target_pb2.VERIFICATION_MODE_REJECTION,
        down_weight=0.5,
        depth=8,
        verify_micros=12_000,
        trace_context="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        banned_token_ids=pack_tokens([9, 998]),
        banned_until=30,
    )
    launch = pb.Launch(
        speculation=[8], source=pb.SPECULATION_SOURCE_CACHE, depth=3, verify_micros=7
    )
    return pb.TargetFrames(
        epoch=3,
        frames=[
            pb.TargetFrame(sequence=2**64 - 1, round=7, open=opened),
            pb.TargetFrame(sequence=1, round=7, outcome=pb.Outcome(accepted=2, token=999)),
            pb.TargetFrame(sequence=1, round=8, launch=launch),
            pb.TargetFrame(sequence=1, round=8, close=pb.Close()),
        ],
    )


def decode(message: pb.TargetFrames) -> list[object]:
    return decode_target_frames(message, LIMITS).frames


def test_every_field_arrives() -> None:
    assert decode(sound()) == [
        Open(
            sequence=2**64 - 1,
            round=7,
            prompt=pack_tokens([1, 2, 999]),
            output=pack_tokens([4]),
            speculation=[5, 6],
            max_tokens=40,
            sampling=SamplingParams(
                seed=SEED,
                temperature=0.5,
                top_k=9,
                logit_bias=((7, 2.5),),
                banned=(9, 998),
                banned_until=30,
            ),
            verification=Verification.REJECTION,
            down_weight=0.5,
            depth=8,
            verify_micros=12_000,
            trace_context="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        Outcome(sequence=1, round=7, accepted=2, token=999),
        Launch(sequence=1, round=8, speculation=[8], source=Source.CACHE, depth=3, verify_micros=7),
        Close(sequence=1, round=8),
    ]

    heard = encode_target_frames(3, decode(sound())).SerializeToString()  # type: ignore[arg-type]
    message = pb.SpeculateRequest.FromString(heard).frames
    assert (message.epoch, decode(message)) == (3, decode(sound()))


Change = Callable[[list[pb.TargetFrame]], object]
ALL_OPEN = pack_tokens([1] * (LIMITS.max_context + LIMITS.max_depth))
WRONG: dict[str, tuple[str, Change]] = {
    "no body": ("[3].body", lambda f: f[3].ClearField("close")),
    "round": ("[1].round", lambda f: setattr(f[1], "round", 2**31)),
    "odd bytes": ("[0].open.prompt", lambda f: setattr(f[0].open, "prompt", b"\0" * 5)),
    "empty": ("[0].open.prompt", lambda f: f[0].open.ClearField("prompt")),
    "too long": ("[0].open.prompt", lambda f: setattr(f[0].open, "prompt", ALL_OPEN + b"\0" * 4)),
    "both too long": ("[0].open.output", lambda f: setattr(f[0].open, "prompt", ALL_OPEN)),
    "outside": (
        "[0].open.output[1]",
        lambda f: setattr(f[0].open, "output", pack_tokens([1, 1000])),
    ),
    "speculation": ("[0].open.speculation[2]", lambda f: f[0].open.speculation.append(1000)),
    "long speculation": ("[0].open.speculation", lambda f: f[0].open.speculation.extend([1] * 7)),
    "max_tokens": ("[0].open.max_tokens", lambda f: setattr(f[0].open, "max_tokens", 3)),
    "no seed": ("[0].open.sampling.seed", lambda f: f[0].open.sampling.ClearField("seed")),
    "temperature": (
        "[0].open.sampling.temperature",
        lambda f: setattr(f[0].open.sampling, "temperature", math.nan),
    ),
    "bias": (
        "[0].open.sampling.logit_bias",
        lambda f: f[0].open.sampling.logit_bias.update({1000: 1.0}),
    ),
    "many biases": (
        "[0].open.sampling.logit_bias",
        lambda f: f[0].open.sampling.logit_bias.update(dict.fromkeys(range(2000), 1.0)),
    ),
    "banned": (
        "[0].open.banned_token_ids[1]",
        lambda f: setattr(f[0].open, "banned_token_ids", pack_tokens([5, 1000])),
    ),
    "all banned": (
        "[0].open.banned_token_ids",
        lambda f: setattr(f[0].open, "banned_token_ids", pack_tokens(list(range(1000)))),
    ),
    "verification": ("[0].open.verification", lambda f: f[0].open.ClearField("verification")),
    "down_weight": ("[0].open.down_weight", lambda f: setattr(f[0].open, "down_weight", 1.01)),
    "nan weight": ("[0].open.down_weight", lambda f: setattr(f[0].open, "down_weight", math.nan)),
    "open depth": ("[0].open.depth", lambda f: setattr(f[0].open, "depth", 9)),
    "trace": ("[0].open.trace_context", lambda f: setattr(f[0].open, "trace_context", "0" * 257)),
    "accepted": ("[1].outcome.accepted", lambda f: setattr(f[1].outcome, "accepted", 9)),
    "token": ("[1].outcome.token", lambda f: setattr(f[1].outcome, "token", 1000)),
    "launched": ("[2].launch.speculation[0]", lambda f: f[2].launch.speculation.insert(0, 4000)),
    "no source": ("[2].launch.source", lambda f: f[2].launch.ClearField("source")),
    "launch depth": ("[2].launch.depth", lambda f: setattr(f[2].launch, "depth", 2**32 - 1)),
}


@pytest.mark.parametrize(("field", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_refused_by_name(field: str, change: Change) -> None:
    message = sound()
    frames = list(message.frames)
    change(frames)
    changed = pb.TargetFrames(epoch=3, frames=frames)
    with pytest.raises(InputError) as error:
        decode(changed)
    assert error.value.field == f"frames.frames{field}"


def test_what_a_newer_target_says_is_passed_over_and_counted() -> None:
    message = sound()
    message.frames[0].open.verification = 3  # type: ignore[assignment]
    message.frames[2].launch.source = 50  # type: ignore[assignment]
    newer = pb.TargetFrame.FromString(b"\x08\x07" + b"\xfa\x7d\x02ok")  # a body of number 2015
    message.frames.append(newer)
    result = decode_target_frames(message, LIMITS)
    assert [type(frame) for frame in result.frames] == [Outcome, Launch, Close]
    assert result.frames[1].source is Source.NGRAM  # type: ignore[union-attr]
    [refusal] = result.refusals
    assert (refusal.sequence, refusal.kind) == (2**64 - 1, NoticeKind.REFUSED)  # type: ignore[union-attr]
    assert "upgrade the draft" in refusal.reason  # type: ignore[union-attr]
    assert result.unknown == 3


def test_the_longest_open_is_allowed() -> None:
    message = sound()
    message.frames[0].open.prompt = ALL_OPEN
    message.frames[0].open.output = b""
    message.frames[0].open.max_tokens = 100
    assert len(decode(message)) == 4


def test_a_message_has_a_largest_number_of_frames() -> None:
    frames = [pb.TargetFrame(sequence=i, close=pb.Close()) for i in range(MAX_TARGET_FRAMES)]
    assert len(decode(pb.TargetFrames(frames=frames))) == MAX_TARGET_FRAMES
    with pytest.raises(InputError, match=f"at most {MAX_TARGET_FRAMES}"):
        decode(pb.TargetFrames(frames=[*frames, frames[0]]))


def assert_held(message: pb.TargetFrames) -> None:
    """Decoded within the limits, or refused for users; nothing else."""
    try:
        result = decode_target_frames(message, LIMITS)
    except InputError:
        return
    dropped = len(message.frames) - len(result.frames) - len(result.refusals)
    assert 0 <= dropped <= result.unknown
    for frame in result.frames:
        match frame:
            case Open():
                committed = unpack_tokens(frame.prompt) + unpack_tokens(frame.output)
                assert 1 <= len(committed) <= min(72, frame.max_tokens)
                assert max([*committed, *frame.speculation]) < 1000
                assert max(len(frame.speculation), frame.depth) <= 8
                assert 0 <= frame.down_weight <= 1
            case Launch():
                assert len(frame.speculation) <= 8
                assert max(frame.speculation, default=0) < 1000
                assert frame.source is not Source.SYNC
            case Outcome():
                assert frame.accepted <= 8
                assert frame.token < 1000


@given(st.data())
@settings(max_examples=share(10_000), derandomize=True, deadline=None)
def test_damaged_frames_are_decoded_within_limits_or_refused(data: st.DataObject) -> None:
    raw = bytearray(sound().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = pb.TargetFrames.FromString(bytes(raw))
    except DecodeError:
        return
    assert_held(message)


def test_the_target_reads_what_the_draft_says() -> None:
    stream = RowsStream("features", RowsDirection.TO_DRAFT, 768, "float32", 9)
    said = [
        Branches(4, 2, [Branch(1, 30, 0, [7, 8])]),
        Branches(4, 3, []),
        Notice(5, 0, NoticeKind.BUSY, "full"),
        Plane(0, 0, PlaneAnswer(PlaneKind.TCP, "127.0.0.1:7500", b"secret", stream)),
    ]
    heard = encode_draft_frames(9, said, Load(open_sequences=0)).SerializeToString()
    message = pb.SpeculateResponse.FromString(heard).frames
    assert decode_draft_frames(message) == DraftMessage(said, Load(open_sequences=0))


@pytest.mark.parametrize(
    ("prefix", "numbers", "kinds"),
    [
        ("NOTICE_KIND", pb.NoticeKind, [*NoticeKind]),
        ("SPECULATION_SOURCE", pb.SpeculationSource, [s for s in Source if s < Source.SYNC]),
        ("VERIFICATION_MODE", target_pb2.VerificationMode, [*Verification]),
    ],
)
def test_kinds_have_the_same_numbers_on_the_wire(
    prefix: str, numbers: Any, kinds: list[IntEnum]
) -> None:
    assert [numbers.Value(f"{prefix}_{each.name}") for each in kinds] == kinds
