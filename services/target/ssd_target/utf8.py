"""Which string of a protobuf message is not UTF-8. The parser only says that one is."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


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
    """(field number, bytes of a length-delimited value or None), as far as the data is whole."""
    at = 0
    while at < len(data):
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
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at
