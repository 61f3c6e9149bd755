"""What a target says of its hidden states in a handshake, and which answers it takes."""

import asyncio
from typing import Any

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.speculation.features import FeatureNeeds, FeatureOffer, FeatureTerms
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer
from ssd_target.links.handshake import Agreed, TargetIdentity, shake_hands
from ssd_target.links.link_errors import EndpointMisfit

OFFER = FeatureOffer(128, 4, "float32", PlaneOffer((PlaneKind.TCP,), "host"))
TERMS = {"boundaries": [0, 2, 4], "hidden_size": 128, "dtype": "bfloat16", "window": 9}


class Answers:
    """A call whose endpoint says welcome."""

    def __init__(self, features: dict[str, Any] | None) -> None:
        welcome = {"protocol_version": 1, "epoch": 3, "max_sequences": 5, "max_depth": 5}
        told = None if features is None else pb.FeatureTerms(**features)
        message = pb.SpeculateResponse(welcome=pb.Welcome(**welcome, features=told))
        self._said, self.heard = message.SerializeToString(), pb.SpeculateRequest()

    async def write(self, message: pb.SpeculateRequest) -> None:
        self.heard = message

    async def read(self) -> bytes:
        return self._said


def shake(call: Answers, offer: FeatureOffer | None) -> Agreed:
    identity = TargetIdentity("target", "abc", 1000, 5, None, offer)
    return asyncio.run(shake_hands(call, identity, 3, trusted=False))


def test_a_head_says_what_it_reads_and_needs_no_trust() -> None:
    call = Answers(TERMS)
    agreed = shake(call, OFFER)
    assert agreed.features == FeatureTerms(FeatureNeeds((0, 2, 4), 128, "bfloat16"), 9)
    hello = call.heard.hello
    assert (hello.features.hidden_size, hello.features.num_layers) == (128, 4)
    assert not hello.HasField("tensor_plane")


def test_others_read_nothing_whatever_is_offered() -> None:
    for offer in (OFFER, None):
        assert shake(Answers(None), offer).features is None


def test_a_target_that_tells_nothing_offers_nothing() -> None:
    call = Answers(None)
    shake(call, None)
    assert not call.heard.hello.HasField("features")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boundaries": [*range(9)]}, "features.boundaries: 1 to 8 are possible, got 9"),
        ({"hidden_size": 64}, "features.hidden_size: the target has 128, the head reads 64"),
        ({"boundaries": [1, 5]}, "features.boundaries: the target has 0 to 4, the head reads 5"),
        ({"dtype": "int4"}, "features.dtype: 'int4'"),
        ({"hidden_size": 0}, "features.hidden_size"),
    ],
)
def test_a_misfit_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EndpointMisfit, match=words):
        shake(Answers({**TERMS, **changes}), OFFER)


def test_terms_without_an_offer_are_refused() -> None:
    with pytest.raises(EndpointMisfit, match="which this target does not tell"):
        shake(Answers(TERMS), None)
