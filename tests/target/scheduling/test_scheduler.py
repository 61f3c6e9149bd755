"""The scheduler: every schedule gives each sequence the text it has alone, and loses nothing.

The "model" here is a paged memory whose every place holds the tokens up to it, as KV depends on
them: reading a wrong, stale or unwritten place is noticed.
"""

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.text.completion import StopRules
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence, SequenceEvent, SequenceState, transition
from ssd_target.scheduling.work import StepPlan, Work
from tests.suite.scale import FULL, share
from tests.target import sequences

VOCAB = 16
ENDS = frozenset([5, 11])  # stop tokens
BLOCK, CHUNK = 2, 6


def next_token(prefix: list[int]) -> int:
    return (zlib.crc32(bytes(prefix)) * 2654435761 >> 16) % VOCAB


def text_alone(prompt: list[int], max_tokens: int) -> list[int]:
    """What plain decoding gives."""
    output: list[int] = []
    while len(output) < max_tokens and not ENDS & set(output):
        output.append(next_token(prompt + output))
    return output


def prompt_with_text_of(length: int, max_tokens: int, length_of_prompt: int = 3) -> list[int]:
    """A prompt after which plain decoding gives so many tokens."""
    prompts = ([i, j] + [1] * (length_of_prompt - 2) for i in range(VOCAB) for j in range(VOCAB))
    return next(p for p in prompts if len(text_alone(p, max_tokens)) == length)


def make_sequence(number: int, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
    return sequences.make_sequence(number, prompt, StopRules(max_tokens, ENDS), **options)


@dataclass
class Engine:
    """A scheduler, a memory, and what a runner and a verifier would do between the two."""

    num_blocks: int = 64
    max_num_seqs: int = 4
    guesses: int = 0  # right ones in each round, as far as there is room
    wrong: int = 0  # and wrong ones after them
    ahead: int | None = None  # None: what these need
    memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    pieces: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    aside: list[int] = field(default_factory=list)  # ids of those that were set aside, in turn
    met: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        pool, rows = BlockPool(self.num_blocks, BLOCK), 1 + self.guesses + self.wrong
        ahead = self.ahead or 2 * rows
        self.scheduler = Scheduler(pool, self.max_num_seqs, CHUNK, ahead=ahead)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.aside += [sequence.id for sequence in plan.set_aside]
        decode = [self.speculate(work) for work in plan.decode]
        self.check_plan(plan)
        for works in (plan.prefill, decode):
            for work in works:
                self.write(work)
            for work in works:
                self.end_round(work)
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        assert sum(len(work.chunk.tokens) for work in plan.prefill) <= CHUNK
        for work in plan.prefill:
            chunk, sequence = work.chunk, work.sequence
            last = chunk.end == sequence.num_committed
            assert last or chunk.end % CHUNK == 0
            assert chunk.start // CHUNK == (chunk.end - 1) // CHUNK
            assert chunk.num_logits == int(last)
            assert chunk.tokens == sequence.committed()[chunk.start : chunk.end]
            self.pieces.setdefault(sequence.id, []).append((chunk.start, chunk.end))
        assert not {w.sequence.id for w in plan.prefill} & {w.sequence.id for w in plan.decode}

    def speculate(self, work: Work) -> Work:
        """The same round with guesses after the last committed token."""
        sequence, lease = work.sequence, work.sequence.lease
        assert lease is not None
        room = max(0, sequence.max_committed - 1 - work.chunk.end)
        chain = sequence.committed()
        for _ in range(min(self.guesses, room)):
            chain.append(next_token(chain))
        for _ in range(min(self.wrong, room - (len(chain) - work.chunk.end))):
            chain.append((next_token(chain) + 1) % VOCAB)
        tokens = chain[work.chunk.start :]
        lease.grow(work.chunk.start + len(tokens))
        chunk = Chunk(tokens, work.chunk.start, lease.blocks, len(tokens))
        return replace(work, chunk=chunk)

    def write(self, work: Work) -> None:
        chunk = work.chunk
        tokens = work.sequence.committed()[: chunk.start] + list(chunk.tokens)
        for i in range(chunk.start, chunk.end):
            self.memory[chunk.blocks[i // BLOCK], i % BLOCK] = tokens[: i + 1]

    def draw(self, work: Work, row: int) -> int:
        """The token after position ``row``, from what the memory holds up to it."""
        places = [self.memory[work.chunk.blocks[i // BLOCK], i % BLOCK] for i in range(row + 1)]
        assert places == [places[-1][: i + 1] for i in range(row + 1)]
        return next_token(places[-1])

    def end_round(self, work: Work) -> None:
        chunk, sequence = work.chunk, work.sequence
        drawn = [self.draw(work, row) for row in range(chunk.end - chunk.num_logits, chunk.end)]
        guesses = chunk.tokens[1:] if sequence.state is SequenceState.DECODE else []
        accepted = 0
        while accepted < len(guesses) and guesses[accepted] == drawn[accepted]:
            accepted += 1
        tokens = drawn[: accepted + 1]
        committed = self.scheduler.advance(work, accepted, tokens)
        assert committed == tokens[: len(committed)]
        self.met["accepted"] += accepted
        self.met["rejected"] += accepted < len(guesses)
        self.met["cut by a stop"] += len(committed) < len(tokens)

    def run(self, *sequences: Sequence) -> list[int]:
        """Returns the ids of these in the order in which they ended."""
        ended: list[int] = []
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            plan = self.step()
            assert plan.prefill or plan.decode, "nothing moves"
            self.scheduler.check_integrity()
            ended += [s.id for s in sequences if s.finished and s.id not in ended]
        return ended


# Sequence states

LEGAL = {
    (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.PREFILL,
    (SequenceState.PREFILL, SequenceEvent.PREFILLED): SequenceState.DECODE,
    (SequenceState.PREFILL, SequenceEvent.REPLAY): SequenceState.REPLAY,
    (SequenceState.REPLAY, SequenceEvent.REPLAYED): SequenceState.DECODE,
    (SequenceState.PREFILL, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.REPLAY, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.REPLAY, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.DECODE, SequenceEvent.SET_ASIDE): SequenceState.WAITING,
    (SequenceState.WAITING, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.PREFILL, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.DECODE, SequenceEvent.END): SequenceState.FINISHED,
}


@pytest.mark.parametrize("event", SequenceEvent)
@pytest.mark.parametrize("state", SequenceState)
def test_a_sequence_makes_the_legal_moves_and_no_others(
    state: SequenceState, event: SequenceEvent
) -> None:
    if (state, event) in LEGAL:
        assert transition(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(RuntimeError, match=f"a {state.value} sequence cannot {event.value}"):
            transition(state, event)


# Text


@pytest.mark.parametrize("guesses", [0, 1, 3])
@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 12, 13])
def test_a_sequence_alone_has_the_text_of_plain_decoding(
    length: int, wrong: int, guesses: int
) -> None:
    """Also when it is resumed after any of its tokens, in a cache that it may fill: its last token
    is drawn but never written."""
    prompt = [(3 * i) % 5 for i in range(length)]
    for max_tokens in (1, 2, 9):
        whole, num_blocks = text_alone(prompt, max_tokens), (length + max_tokens) // BLOCK
        for done in range(len(whole)):
            engine = Engine(num_blocks, guesses=guesses, wrong=wrong)
            sequence = make_sequence(1, prompt, max_tokens, generated=whole[:done])
            engine.run(sequence)
            assert sequence.output == whole
            assert sequence.state is SequenceState.FINISHED
            assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("length", [4, 5])  # 3 + 5 tokens fill a block with the last one
@pytest.mark.parametrize(
    ("further", "met", "unwritten"), [(-2, "rejected", 1), (1, "cut by a stop", 0)]
)
def test_what_is_guessed_from_the_last_token_on_is_neither_committed_nor_cached(
    length: int, further: int, met: str, unwritten: int
) -> None:
    """A round ends in a stop where a guess was wrong, or before further guesses."""
    prompt = prompt_with_text_of(length, max_tokens=30)
    text = text_alone(prompt, 30)
    engine = Engine(guesses=length + further, wrong=1)
    engine.run(make_sequence(1, prompt, 30))
    assert engine.met[met] == 1
    assert engine.scheduler.pool.num_cached == (3 + length - unwritten) // BLOCK
    after = make_sequence(2, prompt + text + [7, 7], 3)
    engine.run(after)
    assert after.output == text_alone(after.prompt, 3)


# Prefill


def cuts(company: int, length: int) -> list[tuple[int, int]]:
    """Where the prefill of one prompt is cut when others are there before it."""
    engine = Engine(max_num_seqs=8)
    others = [make_sequence(10 + i, [15 - i] * (3 + 4 * i), 6) for i in range(company)]
    engine.run(*others, make_sequence(1, list(range(length)), 2))
    return engine.pieces[1]


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_how_a_prompt_is_cut_does_not_depend_on_its_company(length: int) -> None:
    alone = [(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
    assert [cuts(company, length) for company in range(5)] == [alone] * 5


# Tokens that were generated before go through prefill again, or are replayed in steps

Piece = tuple[int, int, int]  # begin, end, rows that are asked about
ROWS = 3


def piece_of(work: Work) -> Piece:
    return work.chunk.start, work.chunk.end, work.chunk.num_logits


@pytest.mark.parametrize(
    ("generated", "replay_rows", "prefilled", "replayed"),
    [
        (5, 0, [(0, 6, 0), (6, 12, 0), (12, 15, 1)], []),  # shapes do not matter
        (5, ROWS, [(0, 6, 0), (6, 10, 0)], [(10, 13, 0), (13, 14, 0), (14, 15, 1)]),
        (1, ROWS, [(0, 6, 0), (6, 10, 0)], [(10, 11, 1)]),
        (0, 0, [(0, 6, 0), (6, 10, 1)], []),
        (0, ROWS, [(0, 6, 0), (6, 10, 1)], []),
    ],
)
def test_what_is_read_again_and_how(
    generated: int, replay_rows: int, prefilled: list[Piece], replayed: list[Piece]
) -> None:
    """The last of the tokens alone is asked about."""
    scheduler = Scheduler(BlockPool(64, BLOCK), 4, CHUNK, replay_rows)
    sequence = make_sequence(1, list(range(10)), 40, generated=[3] * generated)
    scheduler.add(sequence)
    prefills: list[Piece] = []
    replays: list[Piece] = []
    while sequence.num_committed == 10 + generated:
        plan = scheduler.plan()
        assert not plan.decode
        prefills += map(piece_of, plan.prefill)
        replays += map(piece_of, plan.replay)
        for work in (*plan.prefill, *plan.replay):
            scheduler.advance(work, 0, [7] * work.chunk.num_logits)
        scheduler.check_integrity()
    assert (prefills, replays) == (prefilled, replayed)
    assert [len(work.chunk.tokens) for work in scheduler.plan().decode] == [1]
    assert sequence.output == [3] * generated + [7]


# Admission


def test_a_sequence_that_does_not_fit_waits_and_nobody_passes_it() -> None:
    engine = Engine(num_blocks=10)
    large = make_sequence(1, [1] * 10, 9)
    larger = make_sequence(2, [2] * 10, 11)
    small = make_sequence(3, [3], 1)
    for sequence in (large, larger, small):
        engine.scheduler.add(sequence)
    for _ in range(2):
        engine.step()
        assert large.state in (SequenceState.PREFILL, SequenceState.DECODE)
        assert larger.state is small.state is SequenceState.WAITING
    engine.run()
    for sequence in (large, larger, small):
        assert sequence.output == text_alone(sequence.prompt, len(sequence.output))
        assert sequence.finished


# Setting aside


def long_prompt(number: int, length: int = 6) -> list[int]:
    """One of many prompts with a text of 14 tokens at least."""
    prompts = ([i, j] + [2] * (length - 2) for i in range(VOCAB) for j in range(VOCAB))
    return [p for p in prompts if len(text_alone(p, 14)) == 14][number]


@pytest.mark.parametrize(("guesses", "times"), [(0, 2), (2, 1)])
def test_those_that_are_set_aside_end_with_the_text_they_have_alone(
    guesses: int, times: int
) -> None:
    """In the order in which they came; some are set aside twice, and the oldest never is."""
    engine = Engine(num_blocks=14, max_num_seqs=6, guesses=guesses)
    sequences = [make_sequence(i, long_prompt(i), 14) for i in range(6)]
    ended = engine.run(*sequences)
    for sequence in sequences:
        assert sequence.output == text_alone(sequence.prompt, 14)
    assert ended == sorted(ended)
    assert max(Counter(engine.aside).values()) >= times
    assert 0 not in engine.aside
    counters = engine.scheduler.counters
    assert counters.set_aside == len(engine.aside) > 3
    assert bool(counters.replayed_tokens) == (times > 1)
    assert counters.prompt_tokens == 6 * 6  # each is counted once


def test_the_youngest_of_the_identity_that_holds_most_goes_first() -> None:
    engine = Engine(num_blocks=20, max_num_seqs=4)
    owners = ["many", "many", "many", "few"]
    sequences = [make_sequence(i, long_prompt(i), 14, owner=o) for i, o in enumerate(owners)]
    engine.run(*sequences)
    assert engine.aside[:2] == [2, 1]


def test_cached_prefixes_go_before_anybody_is_set_aside() -> None:
    engine = Engine(num_blocks=11)
    engine.run(make_sequence(1, long_prompt(1), 14))
    assert engine.scheduler.pool.num_cached > 5
    engine.run(make_sequence(2, long_prompt(2), 14))
    assert not engine.aside


def test_a_server_that_drains_gives_back_only_what_has_not_begun() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=2)
    sequences = [make_sequence(i, long_prompt(i), 14) for i in range(3)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while not engine.scheduler.counters.set_aside:
        engine.step()
    assert engine.scheduler.give_back() == [sequences[2]]
    engine.run()
    assert sequences[1].output == text_alone(sequences[1].prompt, 14)


# Random schedules

MET: Counter[str] = Counter()
PROMPTS = [[1] * 24, [1, 2] * 12, [1] * 5 + [3] * 19, list(range(16)) + [0] * 8]


class Schedules(RuleBasedStateMachine):
    """Similar prompts, in a cache that holds two or three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(num_blocks=16, max_num_seqs=5, ahead=4)
        self.scheduler = self.engine.scheduler
        self.sequences: list[Sequence] = []
        self.limits: list[int] = []
        self.cancelled: set[int] = set()
        self.admitted: dict[str, list[int]] = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        done=st.integers(0, 3),
        owner=st.sampled_from("ab"),
    )
    def submit(
        self, prompt: list[int], length: int, max_tokens: int, done: int, owner: str = "a"
    ) -> None:
        """New, or resumed after some of its tokens (never after all)."""
        whole = text_alone(prompt[:length], max_tokens)
        generated = whole[: min(done, len(whole) - 1)]
        number = len(self.sequences)
        sequence = make_sequence(
            number, prompt[:length], max_tokens, generated=generated, owner=owner
        )
        self.sequences.append(sequence)
        self.limits.append(max_tokens)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), more=st.integers(1, 3), max_tokens=st.integers(1, 6))
    def follow_up(self, which: int, more: int, max_tokens: int) -> None:
        """A prompt that goes on from what an earlier sequence has so far."""
        earlier = self.sequences[-1 - which % len(self.sequences)].committed()
        if len(earlier) + more <= 24:
            self.submit([*earlier, *[9] * more], 24, max_tokens, 0)
            MET["followed up"] += 1

    @precondition(lambda self: self.sequences)
    @rule(state=st.sampled_from(SequenceState), which=st.integers(0, 9))
    def cancel(self, state: SequenceState, which: int) -> None:
        """One in this state, if there is one."""
        some = [s for s in self.sequences if s.state is state] or self.sequences
        sequence = some[which % len(some)]
        MET[f"cancelled when {sequence.state.value}"] += 1
        if sequence.state is not SequenceState.FINISHED:
            self.cancelled.add(sequence.id)
        leases, held = self.scheduler.pool.num_leases, sequence.lease is not None
        for number in (sequence.id, len(self.sequences)):  # the second is unknown
            self.scheduler.cancel(number)
        assert self.scheduler.pool.num_leases == leases - held
        assert sequence.state is SequenceState.FINISHED
        assert sequence.lease is None

    @precondition(lambda self: self.scheduler.num_running > 1)
    @rule(which=st.integers(0, 9))
    def run_short(self, which: int) -> None:
        """Somebody is set aside, whether there is need or not; the oldest never is."""
        _, *others = self.scheduler._running.values()
        self.scheduler._set_aside(others[which % len(others)])
        MET["set aside"] += 1

    @rule(steps=st.integers(1, 3), guesses=st.integers(0, 2), wrong=st.integers(0, 1))
    def step(self, steps: int, guesses: int, wrong: int) -> None:
        self.engine.guesses, self.engine.wrong = guesses, wrong
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        waiting = [s for s in self.sequences if s.state is SequenceState.WAITING]
        running = [
            s for s in self.sequences if s.state in (SequenceState.PREFILL, SequenceState.DECODE)
        ]
        new = [s for s in waiting if not s.stays]
        had_work = self.scheduler.has_work
        plan = self.engine.step()
        assert bool(plan.prefill or plan.decode) == had_work
        for sequence in new:
            if sequence.stays:
                self.admitted.setdefault(sequence.owner, []).append(sequence.id)
        assert not running or running[0] not in plan.set_aside
        MET["set aside"] += len(plan.set_aside)
        if waiting and waiting[0].state is SequenceState.WAITING and self.scheduler.num_running < 5:
            MET["waited for blocks"] += 1

    @invariant()
    def the_books_agree(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def no_sequence_is_lost(self) -> None:
        states = Counter(sequence.state for sequence in self.sequences)
        assert states[SequenceState.WAITING] == self.scheduler.num_waiting
        assert (
            states[SequenceState.PREFILL] + states[SequenceState.DECODE]
            == self.scheduler.num_running
            <= 5
        )

    @invariant()
    def admission_of_an_identity_is_first_come_first_served(self) -> None:
        assert all(ids == sorted(ids) for ids in self.admitted.values())

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            self.one_step()
        assert not self.scheduler.has_work
        for sequence, limit in zip(self.sequences, self.limits, strict=True):
            alone = text_alone(sequence.prompt, limit)
            assert sequence.state is SequenceState.FINISHED
            if sequence.id in self.cancelled:
                assert sequence.output == alone[: len(sequence.output)]
            else:
                assert sequence.output == alone
        pool = self.scheduler.pool
        assert (pool.num_used, pool.num_reserved, pool.num_leases) == (0, 0, 0)
        MET["hit tokens"] += self.scheduler.counters.hit_tokens
        MET.update(self.engine.met)


@pytest.mark.timeout(600)
def test_in_any_schedule_each_sequence_has_its_own_text_and_nothing_is_lost() -> None:
    MET.clear()
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=share(1000, 100),
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
        ),
    )
    print(dict(MET))
    for what in (
        "accepted",
        "rejected",
        "cut by a stop",
        "hit tokens",
        "followed up",
        "waited for blocks",
        "set aside",
        "cancelled when waiting",
        "cancelled when prefill",
        "cancelled when decode",
        "cancelled when finished",
    ):
        assert MET[what] > (50 if FULL else 2), what


# The check itself


def assert_refused(engine: Engine, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        engine.scheduler.check_integrity()


def test_books_that_do_not_agree_do_not_pass_the_check() -> None:
    engine = Engine()
    sequence, waiting = make_sequence(1, [1, 2, 3], 5), make_sequence(2, [1], 1)
    engine.scheduler.add(sequence)
    engine.step()
    engine.scheduler.check_integrity()
    lease, sequence.lease = sequence.lease, None
    assert_refused(engine, "without a lease")
    sequence.lease = lease
    stray = engine.scheduler.pool.open([9], 2)
    assert stray is not None
    assert_refused(engine, "a lease without a sequence")
    stray.release()
    engine.scheduler.add(waiting)
    waiting.lease = lease
    assert_refused(engine, "a waiting sequence holds blocks")
