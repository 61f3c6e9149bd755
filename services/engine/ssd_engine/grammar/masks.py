"""Writes which tokens may follow rows of a forward, several sequences at the same time."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ssd_engine.grammar.follower import GrammarFollower

ALL = 0xFF  # of a byte
WORD = 32  # bits that lie together


class HeldRow(NamedTuple):
    """A row whose next token follows output and tail."""

    row: int
    follower: GrammarFollower
    output: Sequence[int]
    tail: list[int]


class _Run(NamedTuple):
    """Rows one after the other, each with a token more than the one before."""

    first: HeldRow
    tokens: list[int]  # one for each row after the first

    def rows(self) -> list[HeldRow]:
        first, tokens = self
        return [
            first._replace(row=first.row + i, tail=[*first.tail, *tokens[:i]])
            for i in range(len(tokens) + 1)
        ]


def mask_bytes(vocab_size: int) -> int:
    """The bytes of a row."""
    return -(-vocab_size // WORD) * (WORD // 8)


def write_masks(masks: NDArray[np.uint8], held: Sequence[HeldRow]) -> None:
    """``masks`` [rows, mask_bytes] lie in one piece. Where no token can follow, all are allowed, so
    that something can be drawn: it is left out afterwards. A row after which nothing will be drawn,
    as its tail leaves the grammar, may have any."""
    entries: dict[int, tuple[LLMatcher, _Run]] = {}
    others: list[_Run] = []
    for run in _runs(held):
        first = run.first
        if id(first.follower) in entries:  # it can be at one place only
            others.append(run)
        elif (matcher := first.follower.at([*first.output, *first.tail])) is not None:
            entries[id(first.follower)] = (matcher, run)
    _compute(masks, [(matcher, run.first.row, run.tokens) for matcher, run in entries.values()])
    # A bound that was reached at one of its rows is found once more, at that row alone.
    others += [run for matcher, run in entries.values() if matcher.is_error()]
    for row, follower, output, tail in (row for run in others for row in run.rows()):
        if (allowed := follower.allowed(output, tail)) is not None:
            masks[row, : len(allowed)] = allowed
    for each in held:
        if not masks[each.row].any():
            masks[each.row], each.follower.is_stuck = ALL, True


def _compute(masks: NDArray[np.uint8], entries: list[tuple[LLMatcher, int, list[int]]]) -> None:
    """Each from a row on: for where it stands, and after each token from there."""
    where = (masks.ctypes.data, masks.shape[1], len(masks))
    if single := [(matcher, row) for matcher, row, tokens in entries if not tokens]:
        _at_once().unsafe_compute_mask_ptr(single, *where)
    if several := [entry for entry in entries if entry[2]]:
        _at_once().unsafe_compute_mask_ptr_with_draft_token(several, *where)


def _runs(held: Sequence[HeldRow]) -> list[_Run]:
    runs: list[_Run] = []
    last: HeldRow | None = None
    for row in held:
        if last is not None and _follows(row, last):
            runs[-1].tokens.append(row.tail[-1])
        else:
            runs.append(_Run(row, []))
        last = row
    return runs


def _follows(row: HeldRow, last: HeldRow) -> bool:
    return (
        row.follower is last.follower and row.row == last.row + 1 and row.tail[:-1] == last.tail
    ) and bool(row.tail)


@cache
def _at_once() -> LLExecutor:
    return LLExecutor()
