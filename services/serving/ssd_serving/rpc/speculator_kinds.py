"""The kinds of drafts, as --speculator, metrics and logs name them, and as messages do."""

from ssd.v1 import speculation_pb2 as pb

_STEM = "SPECULATOR_KIND_"
UNKNOWN = "unknown"  # of a newer peer
KINDS = ("model", "head", "ngram", UNKNOWN)


def kind_name(kind: int) -> str:
    """The name of a value of pb.SpeculatorKind."""
    if not kind or kind not in pb.SpeculatorKind.values():
        return UNKNOWN
    return pb.SpeculatorKind.Name(kind).removeprefix(_STEM).lower()
