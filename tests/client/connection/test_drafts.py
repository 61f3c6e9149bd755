"""What drafts say of themselves: kinds by name, planes in words, messages as JSON has them."""

import json

import pytest

from ssd.v1 import speculation_pb2, target_pb2
from ssd_client.connection.drafts import (
    draft_fields,
    draft_kind,
    inside_text,
    kind_text,
    message_fields,
    planes_text,
)


def info(kind: int, **fields: object) -> speculation_pb2.GetDraftInfoResponse:
    return speculation_pb2.GetDraftInfoResponse(name="d", speculator=kind, **fields)


@pytest.mark.parametrize("kind", [*speculation_pb2.SpeculatorKind.values(), 99])
def test_every_kind_has_a_name_and_is_told_in_words(kind: int) -> None:
    told = kind_text(draft_kind(info(kind)))
    newer = kind not in speculation_pb2.SpeculatorKind.values()[1:]
    assert told in (["unknown"] if newer else ["model", "EAGLE-3 head", "n-gram"])


def test_fields_are_those_of_json() -> None:
    terms = speculation_pb2.FeatureTerms(boundaries=[2, 16, 29], hidden_size=4096, dtype="bfloat16")
    report = target_pb2.TensorPlaneReport(stream="features", kind="nccl", state="up", rows=7)
    head = info(speculation_pb2.SPECULATOR_KIND_HEAD, features=terms, planes=[report])
    fields = draft_fields(head)
    assert fields == json.loads(json.dumps(fields))
    assert (fields["kind"], fields["features"]["boundaries"]) == ("head", [2, 16, 29])
    assert (fields["planes"][0]["rows"], fields["planes"][0]["bytes"]) == (7, 0)
    model = draft_fields(info(speculation_pb2.SPECULATOR_KIND_MODEL))
    assert (model["kind"], model["features"], model["planes"]) == ("model", None, [])


def test_a_plane_that_is_not_up_says_so() -> None:
    planes = [
        target_pb2.TensorPlaneReport(stream="features", kind="shared_memory", state="up"),
        target_pb2.TensorPlaneReport(stream="draft_distributions", kind="tcp", state="broken"),
    ]
    said = planes_text([message_fields(each) for each in planes])
    assert said == "features by shared_memory, draft_distributions by tcp (broken)"
    assert planes_text([]) == ""


@pytest.mark.parametrize(
    ("kind", "said"), [("model", "own inside"), ("head", "own (EAGLE-3 head) inside")]
)
def test_the_draft_inside_a_target(kind: str, said: str) -> None:
    inside = target_pb2.DraftInside(kind=kind, name="own")
    fields = message_fields(target_pb2.GetModelInfoResponse(draft_inside=inside))
    assert inside_text(fields["draft_inside"]) == said
    none = message_fields(target_pb2.GetModelInfoResponse())
    assert inside_text(none["draft_inside"]) == ""
