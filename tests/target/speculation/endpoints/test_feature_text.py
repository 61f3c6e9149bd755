"""The features that a target has of a sequence: without a gap, bounded, and kept with blocks."""

import random

import pytest
import torch

from ssd_engine.tensor_plane.host_rows import HostRows
from ssd_target.speculation.endpoints.feature_text import FeatureText
from ssd_target.speculation.endpoints.kept_features import KeptFeatures

BLOCK, WIDTH = 4, 2
ROW_BYTES = WIDTH * 4


def rows(begin: int, end: int) -> HostRows:
    positions = torch.arange(begin, end, dtype=torch.float32)
    return HostRows(positions.unsqueeze(1).repeat(1, WIDTH))


def positions(text: FeatureText, begin: int, end: int) -> list[int]:
    pieces = [piece.get() for piece in text.pieces(begin, end)]
    return [] if not pieces else [int(x) for x in torch.cat(pieces)[:, 0]]


def test_a_gap_begins_anew() -> None:
    text = FeatureText(KeptFeatures(), BLOCK)
    text.add(0, rows(0, 8))
    text.add(11, rows(11, 13))
    assert (text.first, text.end) == (11, 13)
    assert positions(text, 11, 13) == [11, 12]


def test_what_is_read_again_from_the_beginning_changes_nothing() -> None:
    """As after a sequence was set aside."""
    text = FeatureText(KeptFeatures(), BLOCK)
    for begin in (0, 5, 10, 15, 0, 5, 10, 15, 17):
        text.add(begin, rows(begin, begin + 5))
        text.prune(6)
    assert text.end == 22
    assert positions(text, 18, 22) == [18, 19, 20, 21]


@pytest.mark.parametrize(("piece", "again"), [(1, 0), (3, 0), (100, 0), (6, 3)])
def test_pieces_are_the_rows_that_were_added_and_no_more_than_the_window_is_held(
    piece: int, again: int
) -> None:
    """However they come, some of them again."""
    dice, most, end = random.Random(2), 16, 0
    text = FeatureText(KeptFeatures(), BLOCK)
    while end < 400:
        begin = max(text.start, end - dice.randint(0, again))
        more = dice.randint(1, piece)
        text.add(begin, rows(begin, begin + more))
        end = max(end, begin + more)
        text.prune(most)
        held = text.end - text.start
        assert min(end, most) <= held <= most + max(most // 4, 3)
        assert text.num_bytes == held * ROW_BYTES
        assert positions(text, text.start, end) == [*range(text.start, end)]


def test_blocks_that_are_kept_lie_before_the_window() -> None:
    kept = KeptFeatures(1 << 20)
    told = FeatureText(kept, BLOCK)
    told.follow([11, 12, 13])
    told.add(0, rows(0, 14))
    told.keep(99)
    assert len(kept) == 3
    found = FeatureText(kept, BLOCK)  # another sequence, whose first 12 tokens were cached
    found.follow([11, 12, 13])
    found.add(12, rows(12, 20))
    assert found.first == 0
    assert positions(found, 5, 12) == [*range(5, 12)]
    assert positions(found, 12, 20) == [*range(12, 20)]
    kept.forget(11)
    assert found.first == BLOCK
    assert positions(found, 0, 20) == []
    kept.forget(13)
    assert found.first == 12


def test_blocks_are_kept_before_a_window_that_begins_within_one() -> None:
    text = FeatureText(KeptFeatures(1 << 20), BLOCK)
    text.follow([21, 22, 23, 24])
    for position in range(17):
        text.add(position, rows(position, position + 1))
    text.keep(99)
    text.prune(6)
    assert (text.start, text.first) == (11, 0)
    assert positions(text, 2, 17) == [*range(2, 11)]
    assert positions(text, 9, 10) == [9]


def test_only_blocks_all_of_whose_rows_are_here_are_kept() -> None:
    kept = KeptFeatures(1 << 20)
    text = FeatureText(kept, BLOCK)
    text.follow([1, 2])
    for begin, end, num_kept in ((2, 7, 0), (7, 8, 1)):
        text.add(begin, rows(begin, end))
        text.keep(99)
        assert len(kept) == num_kept
    found = kept.get(2)
    assert found is not None
    assert [int(x) for x in found.get()[:, 0]] == [4, 5, 6, 7]


def test_what_was_used_last_is_kept_within_the_budget() -> None:
    size = BLOCK * ROW_BYTES
    kept = KeptFeatures(3 * size)
    for name in (1, 2, 3):
        kept.put(name, rows(0, BLOCK))
    assert kept.get(1) is not None
    kept.put(4, rows(0, BLOCK))
    assert [kept.get(name) is not None for name in (1, 2, 3, 4)] == [True, False, True, True]
    assert kept.num_bytes == 3 * size
    kept.put(5, rows(0, 4 * BLOCK))  # more than there is room for
    for name in (3, 3, 5):
        kept.forget(name)
    assert kept.num_bytes == 2 * size
    kept.clear()
    assert kept.num_bytes == len(kept) == 0
