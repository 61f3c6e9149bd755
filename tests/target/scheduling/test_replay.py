"""Tokens that were generated before go through prefill again, or are replayed in steps."""

from dataclasses import dataclass

import pytest

from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.completion import StopRules
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence, SequenceState
from ssd_target.scheduling.work import Work

BLOCK, CHUNK, ROWS = 2, 6, 3
PROMPT = list(range(10))


@dataclass
class Met:
    """The pieces of a sequence until it has its next token, by the part of the plan."""

    prefill: list[tuple[int, int, int]]  # begin, end, rows that are asked about
    replay: list[tuple[int, int, int]]


def resume(generated: list[int], replay_rows: int) -> tuple[Met, Sequence]:
    scheduler = Scheduler(BlockPool(64, BLOCK), 4, CHUNK, replay_rows)
    rules, sampling = StopRules(40), SamplingParams(seed=0)
    sequence = Sequence(1, PROMPT, generated, sampling, rules, None, [b""] * 16)
    scheduler.add(sequence)
    met, before = Met([], []), sequence.num_committed
    while sequence.num_committed == before:
        plan = scheduler.plan()
        assert not plan.decode
        met.prefill += map(_piece, plan.prefill)
        met.replay += map(_piece, plan.replay)
        for work in (*plan.prefill, *plan.replay):
            scheduler.advance(work, 0, [7] * work.chunk.num_logits)
        scheduler.check_integrity()
    assert sequence.state is SequenceState.DECODE
    assert [len(work.chunk.tokens) for work in scheduler.plan().decode] == [1]
    return met, sequence


def _piece(work: Work) -> tuple[int, int, int]:
    return work.chunk.start, work.chunk.end, work.chunk.num_logits


def test_they_are_prefilled_on_the_grid_where_shapes_do_not_matter() -> None:
    met, _ = resume([5] * 5, replay_rows=0)
    assert met == Met([(0, 6, 0), (6, 12, 0), (12, 15, 1)], [])


def test_where_shapes_matter_the_last_of_them_alone_is_asked_about() -> None:
    met, _ = resume([5] * 5, replay_rows=ROWS)
    assert met == Met([(0, 6, 0), (6, 10, 0)], [(10, 13, 0), (13, 14, 0), (14, 15, 1)])


def test_one_is_replayed_in_one_step() -> None:
    met, _ = resume([5], replay_rows=ROWS)
    assert met == Met([(0, 6, 0), (6, 10, 0)], [(10, 11, 1)])


@pytest.mark.parametrize("replay_rows", [0, ROWS])
def test_a_new_sequence_has_nothing_to_replay(replay_rows: int) -> None:
    met, sequence = resume([], replay_rows)
    assert met == Met([(0, 6, 0), (6, 10, 1)], [])
    assert sequence.output == [7]
