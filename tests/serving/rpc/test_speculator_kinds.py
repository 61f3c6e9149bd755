"""Kinds of drafts: each has one name, in messages, metrics and logs."""

from ssd.v1 import speculation_pb2 as pb
from ssd_serving.rpc.speculator_kinds import KINDS, UNKNOWN, kind_name


def test_every_kind_on_the_wire_has_a_name() -> None:
    assert {kind_name(each) for each in pb.SpeculatorKind.values()} == set(KINDS)


def test_the_kind_of_a_newer_draft_is_not_known() -> None:
    assert kind_name(99) == kind_name(pb.SPECULATOR_KIND_UNSPECIFIED) == UNKNOWN
