"""Writes which tokens may follow rows of a forward: a few at once, many at the same time."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from ssd_engine.grammar.follower import GrammarFollower

ALL = 0xFF  # of a byte
WORD = 32  # bits that lie together
# As long as this takes, other threads are not called: they take as long to wake up.
ALONE_SECONDS = 0.3e-3


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

    def rows(self) -> Iterator[HeldRow]:
        first, tokens = self
        for i in range(len(tokens) + 1):
            yield first._replace(row=first.row + i, tail=[*first.tail, *tokens[:i]])


class _Job(NamedTuple):
    matcher: LLMatcher  # that stands where the run begins
    run: _Run
    tokens: list[int]  # the run's, up to the first that is none


def mask_bytes(vocab_size: int) -> int:
    """The bytes of a row."""
    return -(-vocab_size // WORD) * (WORD // 8)


def write_masks(masks: NDArray[np.uint8], held: Sequence[HeldRow]) -> None:
    """``masks`` [rows, mask_bytes] lie in one piece. Where no token can follow, all are allowed, so
    that something can be drawn: it is left out afterwards. A row after which nothing will be drawn,
    as its tail leaves the grammar, may have any."""
    for runs in _turns(held):
        jobs, others = _jobs(runs)
        _compute(masks, jobs)
        # A bound that was reached at one of its rows is found once more, at that row alone.
        others += [job.run for job in jobs if job.matcher.is_error()]
        for run in others:
            _compute_each(masks, run)
    for each in held:
        if not masks[each.row].any():
            masks[each.row], each.follower.is_stuck = ALL, True


def _turns(held: Sequence[HeldRow]) -> list[list[tuple[GrammarFollower, _Run]]]:
    """A follower can be at one place only: those that have more of a sequence's runs than it has
    followers take another turn."""
    turns: defaultdict[int, list[tuple[GrammarFollower, _Run]]] = defaultdict(list)
    seen: Counter[int] = Counter()
    known: dict[int, list[GrammarFollower]] = {}  # others may come while this is read
    for run in _runs(held):
        first = run.first.follower
        followers = known.setdefault(id(first), [first, *first.others])
        turn, which = divmod(seen[id(first)], len(followers))
        seen[id(first)] += 1
        turns[turn].append((followers[which], run))
    return list(turns.values())


def _jobs(runs: Sequence[tuple[GrammarFollower, _Run]]) -> tuple[list[_Job], list[_Run]]:
    """And runs that cannot begin."""
    jobs: list[_Job] = []
    others: list[_Run] = []
    for follower, run in runs:
        matcher = follower.at([*run.first.output, *run.first.tail])
        if matcher is None:
            others.append(run)
        else:
            jobs.append(_Job(matcher, run, follower.known(run.tokens)))
    return jobs, others


def _compute(masks: NDArray[np.uint8], jobs: list[_Job]) -> None:
    begin, pointer, size = time.perf_counter(), masks.ctypes.data, masks.shape[1]
    for i, (matcher, run, tokens) in enumerate(jobs):
        if len(jobs) - i > 1 and time.perf_counter() - begin > ALONE_SECONDS:
            _compute_at_once(masks, jobs[i:])
            return
        at, done = pointer + run.first.row * size, 0
        matcher.unsafe_compute_mask_ptr(at, size)
        for token in tokens:
            if not matcher.try_consume_tokens([token]):
                break
            done += 1
            matcher.unsafe_compute_mask_ptr(at + done * size, size)
        if done:
            matcher.rollback(done)


def _compute_at_once(masks: NDArray[np.uint8], jobs: list[_Job]) -> None:
    where = (masks.ctypes.data, masks.shape[1], len(masks))
    if single := [(matcher, run.first.row) for matcher, run, tokens in jobs if not tokens]:
        _executor().unsafe_compute_mask_ptr(single, *where)
    if several := [(job.matcher, job.run.first.row, job.tokens) for job in jobs if job.tokens]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(several, *where)


def _compute_each(masks: NDArray[np.uint8], run: _Run) -> None:
    for row, follower, output, tail in run.rows():
        masks[row] = 0
        allowed = follower.allowed(output, tail)
        if allowed is None:
            masks[row] = ALL
        else:
            masks[row, : len(allowed)] = allowed


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
    if row.follower is not last.follower or row.row != last.row + 1 or not row.tail:
        return False
    return row.tail[:-1] == last.tail


@cache
def _executor() -> LLExecutor:
    return LLExecutor()
