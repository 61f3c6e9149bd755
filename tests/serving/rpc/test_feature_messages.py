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


def test_an_offer_is_read_as_it_was_said() -> None:
    message = pb.FeatureOffer.FromString(encode_feature_offer(OFFER).SerializeToString())
    assert decode_feature_offer(message) == OFFER


def test_terms_are_read_as_they_were_said() -> None:
    message = pb.FeatureTerms.FromString(encode_feature_terms(TERMS).SerializeToString())
    assert decode_feature_terms(message) == TERMS
    assert TERMS.needs.width == 3 * 4096
    assert TERMS.needs.row_bytes == 24_576


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


@pytest.mark.parametrize(
    ("needs", "field", "words"),
    [
        (FeatureNeeds((1,), 64, "float32"), "hidden_size", "the target has 128"),
        (FeatureNeeds((), 128, "float32"), "boundaries", "got 0"),
        (FeatureNeeds((0, 5), 128, "float32"), "boundaries", "0 to 4, the head reads 5"),
        (FeatureNeeds((4,), 128, "int8"), "dtype", "'int8'"),
    ],
)
def test_a_misfit_is_named_by_its_field(needs: FeatureNeeds, field: str, words: str) -> None:
    problem = needs.problem_with(hidden_size=128, num_layers=4)
    assert problem is not None
    assert problem[0] == field
    assert words in problem[1]


def test_what_fits_has_no_problem() -> None:
    assert FeatureNeeds((0, 4), 128, "float16").problem_with(128, 4) is None


def test_a_request_is_read_as_it_was_said() -> None:
    frames = [FeatureRequest(7, 3, 40), FeatureRequest(2**60, 0, 0)]
    message = encode_draft_frames(1, frames, Load(1))
    assert decode_draft_frames(message.frames).frames == frames
