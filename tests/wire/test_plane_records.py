"""Bytes on a tensor plane's connection: a record, or a broken plane, and nothing else."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.tensor_plane.protocol.records import (
    ANNOUNCEMENT_BYTES,
    HELLO_BYTES,
    WELCOME_BYTES,
    Announcement,
    Hello,
    Welcome,
)
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from tests.scale import share

RECORDS = {
    Hello: (HELLO_BYTES, b"SSDPLANE"),
    Welcome: (WELCOME_BYTES, b"SSDPLANE"),
    Announcement: (ANNOUNCEMENT_BYTES, b"ROWS"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_any_bytes_are_a_record_or_break_the_plane(kind: Any) -> None:
    size, magic = RECORDS[kind]
    met = {True: 0, False: 0}

    @given(
        st.booleans(), st.binary(min_size=size, max_size=size), st.sampled_from([0, 1, 4, 2**31])
    )
    @settings(max_examples=share(2000), derandomize=True, deadline=None)
    def check(sound: bool, data: bytes, number: int) -> None:
        if sound:
            data = (magic + struct.pack("<I", number) + data)[:size]
        try:
            record = kind.decode(data)
        except PlaneBroken:
            met[False] += 1
        else:
            met[True] += 1
            assert record.encode() == data

    check()
    assert all(met.values())
