"""Features in the handshake and in frames: what is said is what is read, and nonsense is named."""

from typing import Any

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.speculation.features import FeatureNeeds, FeatureOffer, FeatureTerms
from ssd_engine.speculation.frames import FeatureRequest, Load
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer
from ssd_serving.rpc.feature_messages import (
    decode_feature_offer,
    decode_feature_terms,
    encode_feature_offer,
    encode_feature_terms,
)
from ssd_serving.rpc.frame_messages import decode_draft_frames, encode_draft_frames

PLANE = PlaneOffer((PlaneKind.SHARED_MEMORY, PlaneKind.TCP), "host", "device")
OFFER = FeatureOffer(4096, 32, "bfloat16", PLANE)
TERMS = FeatureTerms(FeatureNeeds((2, 16, 29), 4096, "bfloat16"), 1024)


def test_what_was_said_is_read() -> None:
    offer = pb.FeatureOffer.FromString(encode_feature_offer(OFFER).SerializeToString())
    assert decode_feature_offer(offer) == OFFER
    terms = pb.FeatureTerms.FromString(encode_feature_terms(TERMS).SerializeToString())
    assert decode_feature_terms(terms) == TERMS
    assert (TERMS.needs.width, TERMS.needs.row_bytes) == (3 * 4096, 24_576)
    requests = [FeatureRequest(7, 3, 40), FeatureRequest(2**60, 0, 0)]
    message = encode_draft_frames(1, requests, Load(1))
    assert decode_draft_frames(message.frames).frames == requests


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"boundaries": range(65)}, "features.boundaries"),
        ({"hidden_size": 0}, "features.hidden_size"),
        ({"hidden_size": 2**31}, "features.hidden_size"),
    ],
)
def test_terms_of_no_head_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    fields = {"boundaries": [1], "hidden_size": 64, "dtype": "float32", **changes}
    with pytest.raises(InputError) as caught:
        decode_feature_terms(pb.FeatureTerms(**fields))
    assert caught.value.field == field
