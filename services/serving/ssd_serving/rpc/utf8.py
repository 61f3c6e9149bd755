"""Which string of a protobuf message is not UTF-8. The parser only says that one is."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
MAX_FIELDS = 10_000


def find_invalid_utf8(descriptor: Any, data: bytes, prefix: str = "") -> str | None:
    """Path of the first string field whose bytes are not UTF-8; None when there is none."""
    for number, value in _fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None or value is None:
            continue
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
            return path
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = find_invalid_utf8(field.message_type, value, f"{path}.")
            if inner is not None:
                return inner
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, bytes of a length-delimited value or None), as far as the data is sound.

    The sender is not trusted: numbers and the count of fields are bounded.
    """
    at = 0
    for _ in range(MAX_FIELDS):
        key, at = _varint(data, at)
        kind, value = key & 7, None
        if kind == VARINT:
            _, at = _varint(data, at)
        elif kind == LENGTH:
            size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            return
        if not 0 < at <= len(data):
            return  # cut off: what is there of the value says nothing
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends; a position beyond the data when it does not end there."""
    value = 0
    for i, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    return 0, len(data) + 1
