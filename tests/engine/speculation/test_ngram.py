"""The n-gram index says what a search of the whole text says."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.speculation.ngram import MAX_OCCURRENCES, NgramIndex
from tests.suite.scale import share

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def search(text: Sequence[int], n: int) -> list[int]:
    """Where the last n tokens were followed by another before, latest first."""
    if n > len(text):
        return []
    starts = range(len(text) - n - 1, -1, -1)
    return [i + n for i in starts if list(text[i : i + n]) == list(text[-n:])]


def slow_propose(text: list[int], max_n: int, min_n: int, k: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        if found := search(text, n):
            grown = list(text)
            for _ in range(k):
                grown.append(grown[found[0] + len(grown) - len(text)])
            return grown[len(text) :]
    return []


def slow_candidates(text: list[int], max_n: int, count: int) -> list[int]:
    result: list[int] = []
    for n in range(max_n, 0, -1):
        followed = [text[i] for i in search(text, n)[:MAX_OCCURRENCES]]
        ranked = sorted(set(followed), key=lambda t: (-followed.count(t), followed.index(t)))
        result += [token for token in ranked if token not in result]
    return result[:count]


@pytest.mark.parametrize(("max_n", "min_n"), [(0, 0), (2, 3), (3, 0)])
def test_lengths_out_of_order_are_refused(max_n: int, min_n: int) -> None:
    with pytest.raises(ValueError, match="min_n"):
        NgramIndex(max_n, min_n)


@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 5), st.integers(0, 6), st.data())
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_it_says_what_a_search_of_the_whole_text_says(
    pieces: list[list[int]], tail: list[int], max_n: int, k: int, data: st.DataObject
) -> None:
    min_n = data.draw(st.integers(1, max_n))
    index, text = NgramIndex(max_n, min_n), list[int]()
    for piece in pieces:
        index.extend(piece)
        text += piece
        for extra in ([], tail):
            whole = text + extra
            assert index.propose(k, extra) == slow_propose(whole, max_n, min_n, k)
            assert index.candidates(k, extra) == slow_candidates(whole, max_n, k)
            assert len(index) == len(text)  # a tail is text for one call


def test_only_the_latest_occurrences_are_looked_at() -> None:
    for between, seen in [(MAX_OCCURRENCES - 2, [1, 9]), (MAX_OCCURRENCES, [1])]:
        index = NgramIndex(1, 1)
        index.extend([1, 9] + [1] * (between + 1))
        assert index.candidates(2) == seen
