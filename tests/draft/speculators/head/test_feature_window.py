"""The last features of a sequence, by position, in memory that does not grow."""

import torch
from torch import Tensor

from ssd_draft.speculators.head.feature_window import FeatureWindow

WIDTH = 3


def rows(begin: int, end: int) -> Tensor:
    """Each has its position in it."""
    return torch.arange(begin, end, dtype=torch.float32)[:, None].expand(-1, WIDTH)


def kept(window: FeatureWindow, end: int) -> list[int]:
    positions = [position for position in range(-2, end) if position in window]
    if positions:
        told = window.stacked(positions)
        assert told.shape == (len(positions), WIDTH)
        assert told[:, 0].tolist() == positions
    return positions


def test_the_last_rows_are_kept_in_their_places() -> None:
    window = FeatureWindow(8)
    assert kept(window, 4) == []
    for begin, end, first in ((0, 5, 0), (5, 7, 0), (7, 13, 5), (13, 14, 6), (10, 60, 52)):
        window.take(begin, rows(begin, end))
        assert kept(window, 80) == [*range(first, end)]
        assert window.end == end


def test_gaps_rows_told_again_and_rows_of_long_ago() -> None:
    window = FeatureWindow(8)
    window.take(0, rows(0, 4))
    window.take(6, rows(6, 10))  # 0 and 1 are beyond the window now, 4 and 5 were never told
    assert kept(window, 20) == [2, 3, 6, 7, 8, 9]
    assert (window.first(0, 20), window.first(4, 20), window.first(4, 6)) == (2, 6, None)
    assert (window.last(20), window.last(6), window.last(2)) == (9, 3, None)
    window.take(0, rows(0, 6))
    assert kept(window, 20) == [*range(2, 10)]
    window.take(30, rows(30, 31))
    assert kept(window, 40) == [30]


def test_what_no_layer_can_have_given_is_not_kept() -> None:
    window = FeatureWindow(8)
    told = rows(0, 5).clone()
    told[1], told[3], told[4] = float("nan"), float("inf"), 3e38
    window.take(0, told)
    assert kept(window, 10) == [0, 2]
    assert window.end == 3


def test_no_send_is_held_by_a_row_of_it() -> None:
    """However rows are told, the window takes a place for each of them, once."""
    window = FeatureWindow(8)
    window.take(0, rows(0, 1))
    assert window._rows is not None
    own = window._rows.data_ptr()
    for begin in range(1, 400, 5):
        window.take(begin, rows(begin, begin + 50))
    assert window._rows.data_ptr() == own
    assert window._rows.untyped_storage().nbytes() == 8 * WIDTH * 4
