"""Offers and answers of tensor planes survive the link; what is not known here is passed over."""

from dataclasses import replace

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind, PlaneOffer
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_serving.rpc.plane_messages import (
    MAX_STREAMS,
    decode_answer,
    decode_offer,
    encode_answer,
    encode_offer,
)

DISTRIBUTIONS = RowsStream("draft_distributions", RowsDirection.TO_TARGET, 4096, "bfloat16", 8)
FEATURES = RowsStream("features", RowsDirection.TO_DRAFT, 768, "float32", 9)
OFFER = PlaneOffer(tuple(PlaneKind), "a host", "a device", (DISTRIBUTIONS, FEATURES))
ANSWER = PlaneAnswer(PlaneKind.TCP, "127.0.0.1:7500", b"secret", FEATURES)
UNKNOWN = 99


def test_an_offer_and_an_answer_are_read_as_they_were_said() -> None:
    assert decode_offer(encode_offer(OFFER)) == OFFER
    assert decode_answer(encode_answer(ANSWER)) == ANSWER


@pytest.mark.parametrize("kind", [0, pb.TENSOR_PLANE_KIND_GLOO, UNKNOWN])
def test_a_kind_that_is_not_known_is_passed_over(kind: pb.TensorPlaneKind) -> None:
    message = encode_offer(OFFER)
    message.kinds.insert(0, kind)
    assert decode_offer(message) == OFFER
    answer = encode_answer(ANSWER)
    answer.kind = kind
    assert decode_answer(answer) is None


def test_a_stream_that_is_not_declared_in_full_agrees_with_none() -> None:
    message = encode_offer(OFFER)
    message.streams[0].direction = UNKNOWN  # type: ignore[assignment]
    message.streams.add()
    decoded = decode_offer(message).streams
    assert decoded[0] == replace(DISTRIBUTIONS, direction=RowsDirection.UNSPECIFIED)
    assert decoded[2].name == ""
    with pytest.raises(ValueError, match="other direction: 'unspecified' there"):
        DISTRIBUTIONS.agreed_with(decoded)


def test_an_offer_is_read_within_bounds() -> None:
    message = encode_offer(OFFER)
    message.host_id = message.device_id = "x" * 100_000
    for _ in range(1000):
        message.streams.add(name="y" * 1000, dtype="z" * 1000)
    decoded = decode_offer(message)
    assert len(decoded.host_id) == len(decoded.device_id) == 256
    assert len(decoded.streams) == MAX_STREAMS
    assert {len(each.name) for each in decoded.streams[2:]} == {256}
