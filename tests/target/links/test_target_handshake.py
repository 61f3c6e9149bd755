"""What a target says of its hidden states in a handshake, and which answers it takes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.speculation.features import FeatureNeeds, FeatureOffer, FeatureTerms
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer
from ssd_serving.rpc.feature_messages import decode_feature_offer
from ssd_serving.rpc.plane_messages import decode_offer
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.handshake import Agreed, TargetIdentity, _hello, shake_hands
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


@pytest.mark.parametrize("offer", [OFFER, None])
def test_others_read_nothing_whatever_is_offered(offer: FeatureOffer | None) -> None:
    """And a target that tells nothing offers nothing."""
    call = Answers(None)
    assert shake(call, offer).features is None
    assert call.heard.hello.HasField("features") == (offer is not None)


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


# What it says, by whether the endpoint is trusted

CA = Path("ca.pem")
PLANE = PlaneOffer(tuple(PlaneKind), "a host", "a device")
IDENTITY = TargetIdentity(
    "a target", "a tokenizer", 4096, 5, PLANE, FeatureOffer(64, 4, "float32", PLANE)
)


@pytest.mark.parametrize("trusted", [True, False])
def test_an_endpoint_that_is_not_trusted_is_not_joined_by_nccl(trusted: bool) -> None:
    """It is told features all the same, which reveal no more than the tokens do."""
    hello = _hello(IDENTITY, 1, trusted).hello
    told = decode_feature_offer(hello.features).plane
    assert told == (PLANE if trusted else PLANE.hardened())
    assert PlaneKind.TCP in told.kinds
    assert hello.HasField("tensor_plane") == trusted
    if trusted:
        assert decode_offer(hello.tensor_plane) == PLANE


@pytest.mark.parametrize(
    ("credentials", "host", "hidden"),
    [
        (DraftCredentials(ca=CA), "192.0.2.7", True),
        (DraftCredentials(ca=CA), "127.0.0.1", False),
        (DraftCredentials(ca=CA, insecure_plane=True), "192.0.2.7", False),
        (DraftCredentials(), "192.0.2.7", False),
    ],
)
def test_beside_tls_no_plane_is_offered_that_leaves_the_host(
    credentials: DraftCredentials, host: str, hidden: bool
) -> None:
    assert credentials.hides_rows(host) is hidden
    hello = _hello(IDENTITY.on_this_host(), 1, True).hello
    for offer in (decode_feature_offer(hello.features).plane, decode_offer(hello.tensor_plane)):
        assert offer.kinds == (PlaneKind.SHARED_MEMORY,)
