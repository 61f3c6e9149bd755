"""What a target says of itself to an endpoint, by whether it is trusted."""

from pathlib import Path

import pytest

from ssd_engine.speculation.features import FeatureOffer
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer
from ssd_serving.rpc.feature_messages import decode_feature_offer
from ssd_serving.rpc.plane_messages import decode_offer
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.handshake import TargetIdentity, _hello

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
