"""Whose prompt is read next: identities take turns, and short prompts pass long ones."""

import pytest

from ssd_engine.kvcache.block_pool import BlockPool
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence, SequenceState
from tests.target.sequences import make_sequence

CHUNK, BLOCK = 64, 16


class Reading:
    """A scheduler whose sequences are never finished; what is read is written down."""

    def __init__(self, max_num_seqs: int = 64) -> None:
        self.scheduler = Scheduler(BlockPool(20_000, BLOCK), max_num_seqs, CHUNK)
        self.sequences: list[Sequence] = []

    def add(self, owner: str, length: int) -> Sequence:
        number = len(self.sequences) + 1
        sequence = make_sequence(number, [number] * length, owner=owner)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, int]]:
        """Owners and tokens of the step's prefill."""
        plan = self.scheduler.plan()
        for work in (*plan.prefill, *plan.decode):
            self.scheduler.advance(work, 0, [7] if work.chunk.num_logits else [])
        self.scheduler.check_integrity()
        return [(work.sequence.owner, len(work.chunk.tokens)) for work in plan.prefill]

    def steps_until_read(self, sequence: Sequence) -> int:
        count = 0
        while sequence.state is not SequenceState.DECODE:
            self.step()
            count += 1
        return count

    def add_many(self, owner: str, count: int) -> None:
        """Long ones."""
        for _ in range(count):
            self.add(owner, 20 * CHUNK)

    def read_of(self, owner: str, steps: int = 20) -> int:
        """In so many steps, forwards for an owner."""
        return [each for _ in range(steps) for each, _ in self.step()].count(owner)


@pytest.mark.parametrize(("owner", "most"), [("other", 1), ("one", 2)])
def test_a_short_prompt_passes_the_long_ones_of_anybody(owner: str, most: int) -> None:
    reading = Reading()
    reading.add_many("one", 20)
    reading.step()
    assert reading.steps_until_read(reading.add(owner, 10)) <= most


def test_identities_get_equal_shares_whatever_they_ask_for() -> None:
    reading = Reading()
    reading.add_many("many", 15)
    reading.add_many("few", 1)
    assert abs(reading.read_of("few") - 10) <= 1


def test_what_was_begun_is_ended_before_the_next_one_of_its_length() -> None:
    reading = Reading()
    first, second = reading.add("one", 6 * CHUNK), reading.add("one", 6 * CHUNK)
    reading.steps_until_read(first)
    assert second.num_written <= 2 * CHUNK


def test_the_longest_prompt_is_read_while_short_ones_come_without_end() -> None:
    reading = Reading(max_num_seqs=1000)
    longest = reading.add("one", 10 * CHUNK)
    for _ in range(60):
        for _ in range(2):
            reading.add("one", CHUNK)
        reading.step()
    assert longest.state is SequenceState.DECODE


def test_one_that_was_idle_has_saved_nothing() -> None:
    reading = Reading()
    reading.add_many("busy", 10)
    reading.read_of("busy", 50)
    reading.add_many("new", 10)
    assert abs(reading.read_of("busy") - 10) <= 1


def test_short_prompts_share_a_forward() -> None:
    reading = Reading()
    for owner in ("a", "b", "c", "a"):
        reading.add(owner, CHUNK // 4)
    assert len(reading.step()) == 4


@pytest.mark.parametrize("ahead", [0, 3])
def test_places_are_dealt_out_between_identities(ahead: int) -> None:
    """Whoever waits with many requests holds up nobody else's."""
    reading = Reading(max_num_seqs=4)
    for _ in range(30):
        reading.add("many", 10)
    for _ in range(ahead):
        reading.step()
    other = reading.add("other", 10)
    running = list(reading.scheduler._running.values())
    if running:
        reading.scheduler.cancel(running[0].id)
    reading.step()
    assert other.stays == 1
