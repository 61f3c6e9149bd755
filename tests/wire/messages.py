"""Strategies for bytes that claim to be a message, made from its descriptor.

Everything is built on the wire's level, field by field: so fields come twice, members of a oneof
meet, types are wrong, strings are no text, and lengths lie.
"""

import functools
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from hypothesis import strategies as st

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)
MAX_UINT64 = 2**64 - 1
MOST_BYTES = 40_000  # of one value; larger ones are sent on purpose, and seldom

INTEGERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 5, 7, 8, 100, 2047, 2048, 4095, 4096, 2**31 - 1, 2**31]),
    st.sampled_from([2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, MAX_UINT64]),
    st.integers(0, 64),
    st.integers(0, MAX_UINT64),
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e-9, 100.0, 3.4e38]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.floats(width=32),
)
# Plausible in some field of some message; everywhere else they are odd.
WORDS = (
    *("", "a", "user", "system", "assistant", "Once upon a time", "readiness", "\0", "\x1b[31m\n"),
    *("127.0.0.1:1", "unix:/tmp/x", "ssd.v1.TargetService", "ssd/v1/target.proto", "ssd.v1.Hello"),
    *("é\u0301\u202e🧵", "%s%n{0}", "../../etc/passwd", "{{ 7*7 }}", "<|im_start|>"),
)
NO_TEXT = (b"\xff", b"caf\xe9", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\xc0\x80b")


def varint(value: int) -> bytes:
    value &= MAX_UINT64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def record(number: int, kind: int, value: bytes) -> bytes:
    """One field as it is on the wire."""
    size = varint(len(value)) if kind == LENGTH else b""
    return varint(number << 3 | kind) + size + value


_TEXTS = st.one_of(
    st.sampled_from([word.encode() for word in WORDS]),
    st.sampled_from(NO_TEXT),
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.tuples(st.sampled_from([b"a", b"\xff", "ß".encode(), b"story "]), st.integers(1, 6)).map(
        lambda pair: pair[0] * min(10 ** pair[1], MOST_BYTES // len(pair[0]))
    ),
)
_BYTES = st.one_of(
    st.binary(max_size=16),
    st.lists(st.integers(0, 4095), max_size=6).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids)),
    st.integers(0, MOST_BYTES).map(lambda size: b"\x07\0\0\0" * (size // 4) + b"\1" * (size % 4)),
    st.sampled_from(
        [b"[]", b'[{"role":"user","content":null}]', b"[" * MOST_BYTES, b'[{"role":[1]}]']
    ),
)
_SCALARS: dict[int, tuple[int, st.SearchStrategy[bytes]]] = {
    **dict.fromkeys((Field.TYPE_DOUBLE,), (FIXED64, FLOATS.map(lambda x: struct.pack("<d", x)))),
    **dict.fromkeys((Field.TYPE_FLOAT,), (FIXED32, FLOATS.map(lambda x: struct.pack("<f", x)))),
    **dict.fromkeys(
        (Field.TYPE_FIXED64, Field.TYPE_SFIXED64),
        (FIXED64, INTEGERS.map(lambda x: struct.pack("<Q", x))),
    ),
    **dict.fromkeys(
        (Field.TYPE_FIXED32, Field.TYPE_SFIXED32),
        (FIXED32, INTEGERS.map(lambda x: struct.pack("<I", x & 0xFFFFFFFF))),
    ),
    Field.TYPE_STRING: (LENGTH, _TEXTS),
    Field.TYPE_BYTES: (LENGTH, _BYTES),
    Field.TYPE_BOOL: (VARINT, st.sampled_from([b"\0", b"\1", b"\x02", varint(MAX_UINT64)])),
    Field.TYPE_ENUM: (
        VARINT,
        st.sampled_from([0, 1, 2, 3, 4, 5, 9, 99, 2**31, MAX_UINT64]).map(varint),
    ),
}
_VARINTS = (VARINT, INTEGERS.map(varint))


@functools.cache
def _field(field: Any) -> st.SearchStrategy[bytes]:
    """One field as its type says, packed or many times over where it is repeated."""
    if field.type == Field.TYPE_MESSAGE:
        # Put off: a message may contain its own kind.
        inside = st.deferred(lambda: body(field.message_type))
        return inside.map(lambda inner: record(field.number, LENGTH, inner))
    kind, values = _SCALARS.get(field.type, _VARINTS)
    one = values.map(lambda value: record(field.number, kind, value))
    if not field.is_repeated:
        return one
    many = st.tuples(values, st.sampled_from([0, 1, 17, 1025, 5000]))
    repeated = many.map(lambda pair: record(field.number, kind, pair[0][:64]) * pair[1])
    if kind == LENGTH:
        return st.one_of(one, repeated)
    packed = many.map(lambda pair: record(field.number, LENGTH, pair[0] * pair[1]))
    return st.one_of(one, repeated, packed)


_ODD = st.tuples(
    st.one_of(st.integers(1, 30), st.sampled_from([0, 1000, 19_000, 2**29 - 1])),
    st.sampled_from([VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32, 6, 7]),
    st.one_of(st.binary(max_size=12), st.just(b"\x0b" * 200)),  # groups in groups
).map(lambda odd: record(*odd))


@functools.cache
def body(descriptor: Any) -> st.SearchStrategy[bytes]:
    """Valid by type: any of the fields, in any order, as often as it comes."""
    fields = [_field(field) for field in descriptor.fields]
    if not fields:
        return st.one_of(st.just(b""), _ODD)
    return st.lists(st.one_of(*fields), max_size=4).map(b"".join)


def _cut(pair: tuple[bytes, float]) -> bytes:
    return pair[0][: int(len(pair[0]) * pair[1])]


def _flip(drawn: tuple[bytes, list[tuple[float, int]]]) -> bytes:
    data = bytearray(drawn[0])
    for where, value in drawn[1]:
        if data:
            data[int(len(data) * where)] ^= value
    return bytes(data)


_PLACES = st.floats(0, 1, exclude_max=True)


def malformed(sound: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Cut off, with bits turned over, with fields that nobody knows, or twice."""
    return st.one_of(
        st.tuples(sound, _PLACES).map(_cut),
        st.tuples(sound, st.lists(st.tuples(_PLACES, st.integers(1, 255)), max_size=4)).map(_flip),
        st.tuples(sound, _ODD, sound).map(b"".join),
        sound.map(lambda data: data + data),
    )


def requests(descriptor: Any, valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """From wholly right to wholly wrong; a later field changes an earlier one of the same name."""
    right = st.sampled_from([b"", *valid])
    nearly = st.tuples(right, body(descriptor)).map(b"".join)
    return st.one_of(
        right,
        nearly,
        nearly,
        body(descriptor),
        malformed(nearly),
        malformed(right),
        st.binary(max_size=64),
    )
