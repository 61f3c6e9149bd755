"""The contract as it was released, and as its next minor version might be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

RELEASED = Path(__file__).parent / "released" / "ssd-v1-0.1.binpb"
PACKAGE = "ssd.v1"

# What the next version adds everywhere.
NOTE, MEMBER, VALUE = 5000, 5001, 50
Field = descriptor_pb2.FieldDescriptorProto


class Contract:
    """Message classes of one version, made from its descriptors."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            self._pool.Add(file)

    def parse(self, name: str, data: bytes) -> Any:
        kind = message_factory.GetMessageClass(
            self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}")
        )
        return kind.FromString(data)

    def without_unknown(self, name: str, data: bytes) -> bytes:
        """What a peer of this version understands of a message."""
        message = self.parse(name, data)
        message.DiscardUnknownFields()
        return bytes(message.SerializeToString())


def released_files() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())


def next_files() -> descriptor_pb2.FileDescriptorSet:
    """A field more in every message, a value in every enum, a member in every oneof, a method."""
    files = released_files()
    for file in files.file:
        for message in file.message_type:
            _extend(message)
        for enum in file.enum_type:
            enum.value.add(name=f"{enum.name}_FROM_THE_NEXT_VERSION", number=VALUE)
        for service in file.service:
            kind = f".{PACKAGE}.{file.message_type[0].name}"
            service.method.add(name="OfTheNextVersion", input_type=kind, output_type=kind)
    return files


def _extend(message: descriptor_pb2.DescriptorProto) -> None:
    for index in range(len(message.oneof_decl)):
        if any(f.oneof_index == index and f.proto3_optional for f in message.field):
            continue  # no choice: an optional field
        message.field.add(
            name=f"member_{index}",
            number=MEMBER + index,
            type=Field.TYPE_BYTES,
            label=Field.LABEL_OPTIONAL,
            oneof_index=index,
        )
    message.field.add(name="note", number=NOTE, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            _extend(nested)


def annotate(message: Message) -> None:
    """Use the new field in a message and in all within."""
    for each in _all_in(message):
        each.note = "of the next version"  # type: ignore[attr-defined]


def _all_in(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else [value]:
            yield from _all_in(inner)
