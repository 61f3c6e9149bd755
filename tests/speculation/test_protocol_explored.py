"""The protocol of links, sequences and rounds, explored: all that can happen, in every order.

A state is two engines, what each knows of the other, and all that is in flight between them. From
every state every step is taken: a target steps, a draft steps with any number of messages before
it, a message arrives, a link's end learns that it is down, a link comes up; and, a bounded number
of times, something goes wrong: a link breaks, with either side the first to know and frames of the
old epoch still to come; a message arrives twice; branches are dropped before a slow reader; a
sequence is evicted; a draft drains, crashes or falls silent; a target crashes and its requests
come back, resumed; a request is cancelled. Messages of different sequences overtake each other.

In every state: the text is plain decoding's; every branch that a look-up can find was computed for
exactly this text; the books of both sides agree. From every state, once nothing more goes wrong:
every sequence has branches again within a few rounds, and in the end nothing is left anywhere.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
import pytest

from ssd_draft.engine.frame_follower import FrameFollower
from ssd_draft.engine.sequence_room import SequenceRoom
from ssd_draft.front import link as draft_link
from ssd_draft.planning import sequence as draft_sequence
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.speculation.frames import Branch, Branches, Open, TargetFrame
from ssd_engine.speculation.frames import Outcome as OutcomeFrame
from ssd_engine.speculation.speculation import Speculation
from ssd_engine.tensor_plane.protocol import state as plane
from ssd_target.links import link_state
from ssd_target.records.speculation_stats import LookUp
from ssd_target.scheduling import sequence as target_sequence
from ssd_target.speculation.endpoints import session as target_rounds
from ssd_target.speculation.endpoints.branches import BranchStore
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.session import EndpointSession
from tests.speculation import toy_world
from tests.speculation.explorer import Explored, Recovery, explore
from tests.speculation.toy_world import FAULTS, Setting
from tests.suite.scale import FULL, full_only

PATIENCE = 4  # rounds after the last fault within which speculation has to be back
# Sequences: the target and the prompt of each. The draft's best guess of 517's first tokens is
# right, wrong but the second best is right, right, wrong; of 516's right, right, wrong, right.
ONE: Any = ((0, (517,)),)
LONG: Any = ((0, (5, 6, 7)),)  # two steps of prefill
OTHER: Any = ((0, (516,)),)
TWO: Any = (*ONE, *OTHER)
APART: Any = (*ONE, (1, (516,)))
BREAKS = frozenset({"drop", "crash draft", "crash target"})
AMNESIA = frozenset({"drop", "crash target"})
MOVES = frozenset({"drop", "evict"})
GARBLED = frozenset({"down again", "overflow"})
MISSED = frozenset({"drop", "stall"})  # by one who waits

SETTINGS = [
    Setting("a sequence", ONE, max_tokens=4, num_faults=1, faults=FAULTS),
    Setting("two faults", ONE, max_tokens=3, num_faults=2, faults=AMNESIA),
    Setting("deep", OTHER, depth=2, fan_out=(2, 0, 1), max_tokens=5, num_faults=0),
    Setting("waiting", ONE, max_tokens=3, wait=2, num_faults=1, faults=MISSED),
    Setting("two sequences", TWO, max_tokens=3, num_faults=0),
    Setting("two drafts", ONE, ((0, 0), (0, 1)), max_tokens=3, num_faults=1, faults=MOVES),
    Setting("two targets", APART, ((0, 0), (1, 0)), max_tokens=3, num_faults=0, draft_room=1),
]
IN_FULL: dict[str, dict[str, Any]] = {
    "a sequence": dict(max_tokens=5),
    "two faults": dict(max_tokens=4, faults=FAULTS),
    "deep": dict(num_faults=1, faults=FAULTS),
    "waiting": dict(max_tokens=4, wait=3, faults=FAULTS),
    "two sequences": dict(num_faults=1, faults=MOVES | GARBLED),
    "two drafts": dict(max_tokens=4, faults=FAULTS),
    "two targets": dict(num_faults=1, faults=BREAKS, draft_room=8),
}
IN_FULL_ALONE = {"two faults", "two sequences"}


SHORTER = {"a sequence": 3, "waiting": 2, "two targets": 2}  # tokens, where it is not the full run


def scaled(setting: Setting) -> Setting:
    if FULL:
        return replace(setting, **IN_FULL[setting.name])
    return replace(setting, max_tokens=SHORTER.get(setting.name, setting.max_tokens))


@pytest.fixture(scope="module")
def met() -> Counter[LookUp]:
    """What look-ups of all explorations have found."""
    return Counter()


@pytest.mark.parametrize(
    "setting",
    [full_only(each) if each.name in IN_FULL_ALONE else each for each in SETTINGS],
    ids=[setting.name for setting in SETTINGS],
)
@pytest.mark.timeout(10_800)
def test_all_is_well_in_every_state(setting: Setting, met: Counter[LookUp]) -> None:
    setting = scaled(setting)
    recovery = Recovery(PATIENCE)
    explored = explore(setting, recovery)
    assert explored.wrong is None, told(explored)
    expected = setting.faults if setting.num_faults else frozenset()
    assert {"target", "draft"} | expected <= explored.actions.keys()
    met.update(explored.look_ups)
    print(
        f"{setting.name}: {explored.states} states, {explored.transitions} transitions, "
        f"speculation back within {recovery.slowest} rounds"
    )


def test_all_that_a_look_up_can_find_was_found(met: Counter[LookUp]) -> None:
    assert met.keys() == set(LookUp)


def told(explored: Explored) -> str:
    steps = "\n".join(f"  {step}" for step in explored.trace)
    return f"{explored.wrong}, after\n{steps}"


# The tables


@dataclass(frozen=True)
class Table:
    table: dict[Any, Any]
    transition: Callable[[Any, Any], Any]
    start: Enum
    goal: Enum  # that every state but the last ones leads to
    last: frozenset[Enum] = frozenset()  # that nothing leads out of
    refusal: type[Exception] | None = RuntimeError  # of what cannot happen; None: there is none


TABLES = {
    "link at the target": Table(
        link_state.TRANSITIONS,
        link_state.transition,
        link_state.DraftLinkState.CONNECTING,
        link_state.DraftLinkState.UP,
        frozenset({link_state.DraftLinkState.CLOSED}),
    ),
    "sequence and its endpoint": Table(
        target_rounds.TRANSITIONS,
        target_rounds.transition,
        target_rounds.RoundState.DETACHED,
        target_rounds.RoundState.VERIFYING,
    ),
    "sequence at the target": Table(
        target_sequence.TRANSITIONS,
        target_sequence.transition,
        target_sequence.SequenceState.WAITING,
        target_sequence.SequenceState.FINISHED,
        frozenset({target_sequence.SequenceState.FINISHED}),
    ),
    "link at the draft": Table(
        draft_link.TRANSITIONS,
        draft_link.transition,
        draft_link.TargetLinkState.GREETING,
        draft_link.TargetLinkState.ENDED,
        frozenset({draft_link.TargetLinkState.ENDED}),
    ),
    "sequence at the draft": Table(
        draft_sequence.TRANSITIONS,
        draft_sequence.transition,
        draft_sequence.DraftRoundPhase.VERIFYING,
        draft_sequence.DraftRoundPhase.VERIFYING,
        frozenset({draft_sequence.DraftRoundPhase.CLOSED}),
        None,
    ),
    "tensor plane": Table(
        plane.TRANSITIONS,
        plane.transition,
        plane.PlaneState.CONNECTING,
        plane.PlaneState.CLOSED,
        frozenset({plane.PlaneState.CLOSED}),
        ValueError,
    ),
}


def reached(table: Table, start: Enum) -> set[Enum]:
    """Where events lead from a state, itself included."""
    found = {start}
    while more := {to for (of, _), to in table.table.items() if of in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
class TestTables:
    def test_every_pair_is_a_transition_or_is_refused(self, table: Table) -> None:
        events = {type(event) for _, event in table.table}
        for state, event in itertools.product(type(table.start), *events):
            if (state, event) in table.table:
                assert table.transition(state, event) is table.table[state, event]
            elif table.refusal is None:
                assert table.transition(state, event) is None
            else:
                with pytest.raises(table.refusal):
                    table.transition(state, event)

    def test_every_state_is_reached_and_there_is_always_a_way_on(self, table: Table) -> None:
        assert reached(table, table.start) == set(type(table.start))
        for state in type(table.start):
            on = reached(table, state)
            assert on == {state} if state in table.last else table.goal in on


# What must not go unnoticed


def stale_rounds_pass(patch: pytest.MonkeyPatch) -> None:
    def push(self: EndpointSession, link: int, epoch: int, frame: Branches) -> int:
        fits = self.attached and (self.link, self.epoch) == (link, epoch)
        return sum(not (fits and self.branches.add(branch)) for branch in frame.branches)

    patch.setattr(EndpointSession, "push", push)


def stale_epochs_pass(patch: pytest.MonkeyPatch) -> None:
    real = DraftEndpoints.follow

    def follow(self: DraftEndpoints, link: int, epoch: int, *rest: Any) -> None:
        endpoint = self._by_link.get(link)
        real(self, link, epoch if endpoint is None or not endpoint.up else endpoint.epoch, *rest)

    patch.setattr(DraftEndpoints, "follow", follow)


def the_draft_ignores_rounds(patch: pytest.MonkeyPatch) -> None:
    real = DraftSequence.apply

    def apply(self: DraftSequence, frame: Any, now: float) -> bool:
        due = self.round if isinstance(frame, OutcomeFrame) else self.round + 1
        return real(self, msgspec.structs.replace(frame, round=due), now)

    patch.setattr(DraftSequence, "apply", apply)


def gaps_pass(patch: pytest.MonkeyPatch) -> None:
    real = BranchStore.add

    def add(self: BranchStore, branch: Branch) -> bool:
        known = len(self.find(branch.accepted, branch.token))
        start = min(branch.start, known)
        return real(self, msgspec.structs.replace(branch, start=start))

    patch.setattr(BranchStore, "add", add)


def branches_outlive_their_round(patch: pytest.MonkeyPatch) -> None:
    def begin(self: EndpointSession, length: int) -> None:
        self.round += 1
        self.decided = None
        if not self.branches._vocab_size:
            self.branches = BranchStore(length, self._max_depth, self._vocab_size)
        self.branches._length = length

    patch.setattr(EndpointSession, "_begin", begin)


def the_draft_forgets_accepted_tokens(patch: pytest.MonkeyPatch) -> None:
    real = DraftSequence._end_round

    def end_round(self: DraftSequence, frame: OutcomeFrame, now: float) -> bool:
        before = list(self.output)
        fits = real(self, frame, now)
        if fits:
            self.output = [*before, frame.token]
        return fits

    patch.setattr(DraftSequence, "_end_round", end_round)


def speculations_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    def path(speculation: Speculation, own: list[int]) -> range:
        own[: len(speculation)] = speculation.tokens
        return range(len(speculation))

    patch.setattr(toy_world, "accepted_path", path)


def a_lost_link_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    def disconnected(self: DraftEndpoints, link: int, epoch: int, reason: str = "") -> None:
        pass

    patch.setattr(DraftEndpoints, "disconnected", disconnected)


def the_draft_gives_up_in_silence(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: SequenceRoom, link: Any, sequence: DraftSequence, *_: Any) -> None:
        self.close(link, sequence)

    patch.setattr(SequenceRoom, "give_up", give_up)


def a_new_open_adds_to_the_old_one(patch: pytest.MonkeyPatch) -> None:
    real = FrameFollower._follow

    def reopen(self: FrameFollower, link: Any, frame: TargetFrame) -> None:
        if isinstance(frame, Open):
            link.sequences.pop(frame.sequence, None)
        real(self, link, frame)

    patch.setattr(FrameFollower, "_follow", reopen)


def sequences_are_not_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftEndpoints, "leave", DraftEndpoints._detach)


def an_old_launch_stays_unanswered(patch: pytest.MonkeyPatch) -> None:
    real = DraftEndpoints._detach

    def detach(self: DraftEndpoints, state: Any, reason: str) -> None:
        endpoint = self._by_link[state.session.link]
        since = endpoint.unanswered_since
        real(self, state, reason)
        endpoint.unanswered_since = since

    patch.setattr(DraftEndpoints, "_detach", detach)


# While one sequence is answered, nobody misses the answers to the other.
EVICTED = Setting("evicted", TWO, max_tokens=3, num_faults=1, faults=frozenset({"evict"}))
GAPS = Setting(
    "gaps", OTHER, depth=2, fan_out=(2, 0, 1), max_tokens=4, num_faults=1, faults=GARBLED
)
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = [
    (stale_rounds_pass, "a sequence", "computed for another text"),
    (stale_epochs_pass, "two faults", "computed for another text"),
    (the_draft_ignores_rounds, "a sequence", "not back within"),
    (gaps_pass, "gaps", "computed for another text"),
    (branches_outlive_their_round, "a sequence", "computed for another text"),
    (the_draft_forgets_accepted_tokens, "deep", "computed for another text"),
    (speculations_are_not_verified, "a sequence", "not plain decoding's"),
    (a_lost_link_goes_unnoticed, "a sequence", "not back within"),
    (the_draft_gives_up_in_silence, "evicted", "not back within"),
    (a_new_open_adds_to_the_old_one, "a sequence", "not opened or closed once"),
    (sequences_are_not_closed, "a sequence", "holds a sequence that has ended"),
    (an_old_launch_stays_unanswered, "a sequence", "expects an answer"),
]


@pytest.mark.parametrize(
    ("mutant", "name", "wrong"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS]
)
def test_what_is_wrong_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = next(setting for setting in (*SETTINGS, EVICTED, GAPS) if setting.name == name)
    mutant(monkeypatch)
    explored = explore(setting, Recovery(PATIENCE))
    assert explored.wrong is not None, f"nothing in {explored.states} states"
    assert wrong in explored.wrong, told(explored)
    print(f"{mutant.__name__}: {told(explored)}")
