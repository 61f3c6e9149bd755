"""The n-gram index says what a search of the whole text says."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.speculation.ngram import MAX_OCCURRENCES, NgramIndex
from tests.suite.scale import share

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def index_of(tokens: Sequence[int], max_n: int = 4, min_n: int = 2) -> NgramIndex:
    index = NgramIndex(max_n, min_n)
    index.extend(tokens)
    return index


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


def test_what_followed_is_proposed() -> None:
    assert index_of([7, 1, 2, 3, 4, 5, 9, 1, 2]).propose(3) == [3, 4, 5]


def test_the_longest_match_wins_then_the_latest() -> None:
    assert index_of([1, 2, 3, 50, 2, 3, 60, 1, 2, 3]).propose(1) == [50]
    assert index_of([2, 3, 50, 2, 3, 60, 2, 3]).propose(1) == [60]


def test_one_equal_token_is_no_match_unless_asked_for() -> None:
    text = [1, 2, 3, 9, 2]
    assert index_of(text).propose(2) == []
    assert index_of(text, min_n=1).propose(2) == [3, 9]


def test_a_loop_is_proposed_as_a_loop() -> None:
    assert index_of([5, 1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index_of([4, 4, 4]).propose(5) == [4] * 5


def test_a_tail_is_text_for_one_call() -> None:
    index = index_of([1, 2, 3, 4, 8, 8])
    assert index.propose(2, tail=[1, 2]) == [3, 4]
    assert index.propose(2, tail=[6, 7, 6, 7]) == [6, 7]  # a match within the tail
    assert index.candidates(3, tail=[2]) == [3]
    assert len(index) == 6
    assert index.propose(2) == []


def test_candidates_are_distinct_longer_matches_first_then_the_more_frequent() -> None:
    text = [1, 2, 40, 1, 2, 30, 1, 2, 40, 9, 2, 77, 1, 2]
    assert index_of(text).candidates(5) == [40, 30, 77]
    assert index_of(text).candidates(2) == [40, 30]
    assert index_of(text).candidates(0) == []


def test_an_empty_or_new_text_proposes_nothing() -> None:
    for text in ([], [1], [1, 2, 3]):
        assert index_of(text).propose(4) == []
        assert index_of(text).candidates(4) == []


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


def test_a_tail_leaves_no_trace() -> None:
    rng = random.Random(1)
    text = [rng.randrange(5) for _ in range(300)]
    index, untouched = NgramIndex(), NgramIndex()
    for token in text:
        index.candidates(3, tail=[rng.randrange(5) for _ in range(rng.randrange(6))])
        index.extend([token])
        untouched.extend([token])
    assert vars(index) == vars(untouched)


def test_only_the_latest_occurrences_are_looked_at() -> None:
    for between, seen in [(MAX_OCCURRENCES - 2, [1, 9]), (MAX_OCCURRENCES, [1])]:
        assert index_of([1, 9] + [1] * (between + 1), max_n=1, min_n=1).candidates(2) == seen
