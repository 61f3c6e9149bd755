"""Links share the draft's engine: who asks for little does not wait for who asks for much."""

from collections.abc import Sequence

import pytest

from ssd_draft.engine.core import DraftCore
from ssd_draft.engine.fair_scheduler import (
    AT_WORK_SECONDS,
    JOIN,
    SHORT_STEP,
)
from ssd_draft.planning.plan import Planner, RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_engine.kvcache.cached_path import NoRoom
from ssd_engine.speculation.frames import Close, Launch, Outcome, Source
from tests.draft.told_draft import opened
from tests.speculation.toy_world import ToySpeculator

BASE, PER_ROW = 0.002, 0.0002  # seconds of a forward, as on a CPU
DEPTH, WIDTH = 5, 16
MAX_ROWS, MAX_SEQUENCES, MEMORY = 256, 128, 128_000


class Engine(ToySpeculator):
    """A draft without a model: trees of ``WIDTH`` rows and ``DEPTH`` forwards, and a clock."""

    def __init__(self, per_row: float = PER_ROW) -> None:
        super().__init__()
        self.now = 0.0
        self._per_row = per_row
        self.forwards: list[dict[int, int]] = []  # rows of each link
        self.used = 0  # tokens of memory

    def open(self, sequence: DraftSequence, scope: int) -> None:
        if self.used + sequence.max_tokens > MEMORY:
            raise NoRoom("full")
        self.used += sequence.max_tokens
        sequence.state = [len(sequence.prompt), 0]  # prompt to compute, depth that is done

    def memory_share(self, sequence: DraftSequence) -> float:
        return sequence.max_tokens / MEMORY

    def on_round_changed(self, sequence: DraftSequence) -> None:
        sequence.state = [0, 0]
        sequence.complete = sequence.phase is DraftRoundPhase.DECIDED

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        return min(limit, sequence.state[0]) or WIDTH

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        rows: dict[int, int] = {}
        for sequence in sequences:
            rows[sequence.link] = rows.get(sequence.link, 0) + self.rows(sequence, limit)
            if sequence.state[0]:
                sequence.state[0] -= self.rows(sequence, limit)
            else:
                sequence.state[1] += 1
                sequence.complete = sequence.state[1] == DEPTH
        self.forwards.append(rows)
        total = sum(rows.values())
        self.now += BASE + self._per_row * total
        return total

    def close(self, sequence: DraftSequence) -> None:
        self.used -= sequence.max_tokens
        sequence.state = None

    def check_integrity(self, num_sequences: int) -> None:
        pass


class World:
    """A draft core over such an engine, and targets that play rounds with it."""

    def __init__(self, per_row: float = PER_ROW) -> None:
        self.engine = Engine(per_row)
        self.core = DraftCore(
            self.engine,
            make_planner=lambda depth: Planner(depth, WIDTH),
            max_num_seqs=MAX_SEQUENCES,
            max_seqs_per_link=None,
            max_rows=MAX_ROWS,
            prefill_chunk=512,
            clock=lambda: self.engine.now,
        )
        self._rounds: dict[tuple[int, int], int] = {}

    def connect(self, link: int, sequences: int, prompt: int = 4) -> None:
        self.core.handle(TargetLinkUp(link, 8))
        for name in range(sequences):
            self.open(link, name, prompt)

    def open(self, link: int, name: int, prompt: int, max_tokens: int = 1000) -> None:
        tokens = [1] * prompt
        frame = opened(name, tokens, max_tokens=max_tokens, depth=DEPTH, verify_micros=50_000)
        self._rounds[link, name] = 0
        self.core.handle(TargetFrames(link, [frame]))

    def next_round(self, link: int, name: int) -> None:
        r = self._rounds[link, name]
        self._rounds[link, name] = r + 1
        launch = Launch(name, r + 1, [], Source.NONE, DEPTH, 50_000)
        self.core.handle(TargetFrames(link, [Outcome(name, r, 0, 1), launch]))

    def sequence(self, link: int, name: int) -> DraftSequence | None:
        return self.core._links[link].sequences.get(name)

    def is_ready(self, link: int, name: int) -> bool:
        """All is prepared for the round that the target last launched."""
        found = self.sequence(link, name)
        return found is not None and found.complete and found.round == self._rounds[link, name]

    def flood(self, link: int, count: int) -> None:
        """A new round for each sequence that is ready, without a pause; and some shouting."""
        for name in range(count):
            if self.is_ready(link, name):
                self.next_round(link, name)
        self.core.handle(TargetFrames(link, [Close(10**9, 0)] * 50))

    def round_times(
        self,
        link: int,
        count: int,
        rounds: int,
        flooders: dict[int, int],
        thinking_seconds: float = 0.05,
    ) -> float:
        """Mean seconds in which the rounds of a link's sequences are prepared for."""
        times = []
        for _ in range(rounds):
            for name in range(count):
                self.next_round(link, name)
            begin = self.engine.now
            while not all(self.is_ready(link, name) for name in range(count)):
                self.step(flooders)
            times.append(self.engine.now - begin)
            thinking = self.engine.now + thinking_seconds
            while self.engine.now < thinking:
                self.step(flooders)
        return sum(times) / len(times)

    def step(self, flooders: dict[int, int]) -> None:
        for flooder, sequences in flooders.items():
            self.flood(flooder, sequences)
        before = self.engine.now
        self.core.step()
        self.core.check_integrity()
        if self.engine.now == before:
            self.engine.now += 0.0005

    def served(self, link: int) -> int:
        return sum(rows.get(link, 0) for rows in self.engine.forwards)


def settled(world: World, link: int, count: int, flooders: dict[int, int]) -> None:
    while not all(world.is_ready(link, name) for name in range(count)):
        world.step(flooders)


@pytest.mark.parametrize(("flooders", "thinking"), [(1, 0.05), (3, 0.2)])
def test_a_small_link_hardly_notices_flooding_ones(flooders: int, thinking: float) -> None:
    """One that asks for less than its share of the engine: here half, or a quarter."""
    alone = World()
    alone.connect(1, 2)
    settled(alone, 1, 2, {})
    time_alone = alone.round_times(1, 2, 40, {}, thinking)

    world = World()
    world.connect(1, 2)
    floods = {2 + i: 30 for i in range(flooders)}
    for link, sequences in floods.items():
        world.connect(link, sequences, prompt=400)
    settled(world, 1, 2, floods)
    beside = world.round_times(1, 2, 40, floods, thinking)
    # A forward of another link that has begun, and little more for each of its own.
    assert beside < JOIN * time_alone + SHORT_STEP
    # All that the small link leaves is used.
    assert sum(world.served(link) for link in floods) > world.served(1)


def test_links_that_ask_for_the_same_share_each_forward() -> None:
    world = World()
    for link in (1, 2):
        world.connect(link, 4)
    everybody = {1: 4, 2: 4}
    for _ in range(400):
        world.step(everybody)
    assert world.served(1) == pytest.approx(world.served(2), rel=0.05)
    assert sum(len(rows) == 2 for rows in world.engine.forwards) > 0.9 * len(world.engine.forwards)


def test_who_has_nothing_to_do_does_not_keep_another_from_the_whole_forward() -> None:
    world = World()
    world.connect(1, 2)
    world.connect(2, 40)
    settled(world, 1, 2, {2: 40})
    world.engine.forwards.clear()
    while world.engine.now < 3 * AT_WORK_SECONDS:
        world.step({2: 40})
    assert max(rows[2] for rows in world.engine.forwards) == MAX_ROWS


def test_where_rows_cost_nothing_all_ride_along() -> None:
    """As on a GPU that is bound by memory: a flood gets what others leave, in the same forward."""
    world = World(per_row=0.0)
    world.connect(1, 2)
    world.connect(2, 40)
    flood = {2: 40}
    settled(world, 1, 2, flood)
    world.round_times(1, 2, 20, flood)
    together = [rows for rows in world.engine.forwards if 1 in rows]
    assert sum(2 in rows for rows in together) > 0.9 * len(together)


def test_a_long_prompt_does_not_hold_up_another_link() -> None:
    world = World()
    world.connect(1, 1)
    settled(world, 1, 1, {})
    before = world.round_times(1, 1, 20, {})
    world.core.handle(TargetLinkUp(2, 8))
    for name in range(10):
        world.open(2, name, 2000)
    assert world.round_times(1, 1, 20, {}) < 2 * before + 2 * SHORT_STEP
    assert world.served(2) > 4000


@pytest.mark.parametrize(
    ("greedy", "max_tokens", "newcomers", "left"),
    [(200, 10, 10, 64), (20, 12_800, 1000, 5), (64, 1000, 1000, 64)],
    ids=["places", "memory", "no more than its share"],
)
def test_a_link_gets_its_share_of_the_room(
    greedy: int, max_tokens: int, newcomers: int, left: int
) -> None:
    """Whatever is scarce, the first link has taken all that it could get; what is beyond its
    share is given back when another link asks for it, and nothing else."""
    world = World()
    for link in (1, 2):
        world.core.handle(TargetLinkUp(link, 8))
    for name in range(greedy):
        world.open(1, name, 4, max_tokens)
        world.step({})
    taken = held(world, 1)
    assert taken == min(greedy, MAX_SEQUENCES, MEMORY // max_tokens)
    for name in range(100):
        world.open(2, name, 4, newcomers)
        world.step({})
    assert (held(world, 1), held(world, 2)) == (left, 64)
    assert world.core.counters.evictions == taken - left


def test_links_have_sequences_of_their_own_whatever_their_names() -> None:
    world = World()
    for link in (1, 2):
        world.connect(link, 4)
        settled(world, link, 4, {})
    world.core.handle(TargetFrames(2, [Close(name, 0) for name in range(4)]))
    world.step({})
    assert (held(world, 1), held(world, 2)) == (4, 0)
    assert all(world.is_ready(1, name) for name in range(4))


def held(world: World, link: int) -> int:
    return len(world.core._links[link].sequences)
