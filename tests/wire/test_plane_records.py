"""Bytes on a tensor plane's connection: what was agreed, or a broken plane, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.records import ANNOUNCEMENT_BYTES, Announcement
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms
from tests.suite.scale import share

STREAM = RowsStream("draft_distributions", RowsDirection.TO_TARGET, 1000, "bfloat16", 6)
TERMS = PlaneTerms(PlaneKind.TCP, 1, STREAM)


def test_any_bytes_are_an_announcement_or_break_the_plane() -> None:
    met = {True: 0, False: 0}

    @given(st.booleans(), st.binary(min_size=ANNOUNCEMENT_BYTES, max_size=ANNOUNCEMENT_BYTES))
    @settings(max_examples=share(2000), derandomize=True, deadline=None)
    def check(sound: bool, data: bytes) -> None:
        data = b"ROWS" + data[4:] if sound else data
        try:
            record = Announcement.decode(data)
        except PlaneBroken:
            met[False] += 1
        else:
            met[True] += 1
            assert record.encode() == data

    check()
    assert all(met.values())


def test_terms_are_these_or_are_refused() -> None:
    said = TERMS.encode()
    TERMS.check(said)

    @given(st.integers(0, len(said) - 1), st.integers(1, 255), st.binary(max_size=100))
    @settings(max_examples=share(2000), derandomize=True, deadline=None)
    def check(place: int, change: int, noise: bytes) -> None:
        changed = bytearray(said)
        changed[place] ^= change
        for data in (bytes(changed), said[:place], noise, said[:place] + noise):
            if data != said:
                with pytest.raises(ValueError):
                    TERMS.check(data)

    check()
