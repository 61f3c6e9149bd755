"""What drafts and their targets say of a draft: its kind, and the planes that carry its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from ssd.v1 import speculation_pb2

UNKNOWN = "unknown"  # of a newer draft
_IN_WORDS = {"model": "model", "head": "EAGLE-3 head", "ngram": "n-gram"}


def draft_kind(info: speculation_pb2.GetDraftInfoResponse) -> str:
    """ "model", "head" or "ngram", as --speculator has it; "unknown" for another one."""
    if not info.speculator or info.speculator not in speculation_pb2.SpeculatorKind.values():
        return UNKNOWN
    name: str = speculation_pb2.SpeculatorKind.Name(info.speculator)
    return name.removeprefix("SPECULATOR_KIND_").lower()


def kind_text(kind: str) -> str:
    """A kind in words."""
    return _IN_WORDS.get(kind, kind)


def draft_fields(info: speculation_pb2.GetDraftInfoResponse) -> dict[str, Any]:
    """All that a draft says of itself, with its kind by name."""
    fields = message_fields(info)
    del fields["speculator"]
    return {"kind": draft_kind(info), **fields}


def inside_text(inside: Mapping[str, Any] | None) -> str:
    """The draft inside a target; empty where it has none, or does not say."""
    if not inside:
        return ""
    kind = kind_text(inside["kind"])
    return f"{inside['name']} inside" if kind == "model" else f"{inside['name']} ({kind}) inside"


def planes_text(planes: Sequence[Mapping[str, Any]]) -> str:
    """How rows travel: "features by nccl"; a plane that is not up says so."""
    return ", ".join(
        f"{plane['stream']} by {plane['kind']}"
        + ("" if plane["state"] == "up" else f" ({plane['state']})")
        for plane in planes
    )


def message_fields(message: Message) -> dict[str, Any]:
    """The fields of a message without maps as JSON has them; what is not there is None."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return [message_fields(each) if isinstance(each, Message) else each for each in value]
    return message_fields(value) if isinstance(value, Message) else value
