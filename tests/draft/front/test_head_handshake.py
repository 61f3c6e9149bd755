"""A head and its target fit, or the target is told why not, field by field."""

from dataclasses import replace
from typing import Any

import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.front.handshake import (
    HandshakeRefused,
    check_hello,
    is_of_another_target,
    link_up,
    make_welcome,
)
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from tests.draft.scripted_draft import ENDPOINT, hello

HEAD = replace(
    ENDPOINT,
    speculator="SPECULATOR_KIND_HEAD",
    features=FeatureTerms(FeatureNeeds((1, 2, 4), 128, "float32"), 64),
)
TOLD: dict[str, Any] = {
    "hidden_size": 128,
    "num_layers": 4,
    "dtype": "float32",
    "plane": pb.TensorPlaneOffer(kinds=[pb.TENSOR_PLANE_KIND_TCP], host_id="host"),
}


def said(**changes: Any) -> pb.Hello:
    return hello(features=pb.FeatureOffer(**{**TOLD, **changes})).hello


def test_a_fitting_target_hears_what_the_head_reads() -> None:
    limits = check_hello(said(), HEAD)
    welcome = make_welcome(said(), HEAD)
    assert welcome.speculator == pb.SPECULATOR_KIND_HEAD
    assert list(welcome.features.boundaries) == [1, 2, 4]
    assert (welcome.features.hidden_size, welcome.features.window) == (128, 64)
    up = link_up(1, said(), limits)
    assert up.plane is None
    assert up.features is not None
    assert up.features.kinds == (PlaneKind.TCP,)


def test_a_target_that_tells_nothing_is_refused_by_a_head_alone() -> None:
    with pytest.raises(HandshakeRefused, match="features: the target tells none") as caught:
        check_hello(hello().hello, HEAD)
    assert caught.value.reason == "features"
    assert "upgrade the target" in str(caught.value)
    limits = check_hello(hello().hello, ENDPOINT)
    assert link_up(1, hello().hello, limits).features is None
    assert not make_welcome(hello().hello, ENDPOINT).HasField("features")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "features.hidden_size: the target has 64, the head reads 128"),
        ({"num_layers": 3}, "features.boundaries: the target has 0 to 3, the head reads 4"),
    ],
)
def test_a_misfit_is_refused_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HandshakeRefused, match=words):
        check_hello(said(**changes), HEAD)


@pytest.mark.parametrize(
    ("verifier", "name", "other"),
    [
        ("", "anything", False),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B", False),
        ("meta-llama/Llama-3.1-8B", "Qwen3-8B", True),
    ],
)
def test_a_target_of_another_name_is_noticed(verifier: str, name: str, other: bool) -> None:
    message = hello(target_name=name).hello
    assert is_of_another_target(message, replace(HEAD, verifier=verifier)) is other
