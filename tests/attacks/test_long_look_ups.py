"""Long sequences at a draft that looks n-grams up: nobody waits for them to be indexed."""

import itertools
from pathlib import Path

import pytest

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.ngram import MOST_TOKENS, NgramSpeculator
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import (
    Launch,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Source,
    Verification,
)
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.records.speculation_options import SpeculationRequest
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.endpoints.sequence_speculation import (
    INDEXED_AT_ONCE,
    SequenceSpeculation,
)
from ssd_target.speculation.endpoints.session import EndpointSession
from ssd_target.speculation.off import PlainDecoding
from tests.processes import draft
from tests.waiting import HANG_SECONDS, wait_until
from tools.attack.attackers import HandMadeLink

LONG, CHUNK, ROWS = 20_000, 64, 256
DEPTH = 3


def opened(number: int, length: int) -> Open:
    prompt = pack_tokens([5 + i % 50 for i in range(length)])
    params = SamplingParams(seed=1, temperature=0.0)
    return Open(number, 0, prompt, b"", [], 10**6, params, Verification.COUPLED, 1.0, DEPTH, 0)


def make_core(max_tokens: int = 10**6) -> DraftCore:
    core = DraftCore(
        NgramSpeculator(max_tokens),
        lambda depth: Planner(DEPTH, 8),
        64,
        None,
        ROWS,
        CHUNK,
        clock=itertools.count(0.0, 1e-6).__next__,
    )
    for link in (1, 2):
        core.handle(TargetLinkUp(link, DEPTH))
    return core


def steps_until_complete(core: DraftCore, link: int, number: int) -> int:
    steps = 0
    while number not in (open_ := core._links[link].sequences) or not open_[number].complete:
        core.step()
        core.check_integrity()
        steps += 1
        assert steps < 10_000
    return steps


def test_a_short_sequence_does_not_wait_for_the_long_ones_of_another_target() -> None:
    core = make_core()
    core.handle(TargetFrames(1, [opened(i, LONG) for i in range(10)]))
    core.step()
    core.handle(TargetFrames(2, [opened(1, 30)]))
    assert steps_until_complete(core, 2, 1) <= 2


def test_a_step_indexes_no_more_than_its_rows() -> None:
    core = make_core()
    core.handle(TargetFrames(1, [opened(1, LONG)]))
    core.step()
    assert len(core._links[1].sequences[1].state.index) <= ROWS
    steps_until_complete(core, 1, 1)
    sequence = core._links[1].sequences[1]
    assert len(sequence.state.index) == LONG
    assert sequence.branches


def test_what_is_held_is_bounded() -> None:
    core = make_core(max_tokens=2 * LONG)
    core.handle(TargetFrames(1, [opened(i, LONG) for i in range(3)]))
    frames = [frame for link in core.step().links for frame in link.frames]
    refused = [frame for frame in frames if isinstance(frame, Notice)]
    assert [frame.kind for frame in refused] in ([NoticeKind.BUSY], [NoticeKind.LOST])
    assert sum(s.num_committed for s in core._links[1].sequences.values()) <= 2 * LONG
    core.handle(TargetFrames(2, [opened(9, 3 * LONG)]))
    frames = [frame for link in core.step().links for frame in link.frames]
    assert [frame.kind for frame in frames if isinstance(frame, Notice)] == [NoticeKind.REFUSED]


def test_a_sequence_that_grows_beyond_the_bound_is_given_up() -> None:
    core = make_core(max_tokens=34)
    core.handle(TargetFrames(1, [opened(1, 30)]))
    steps_until_complete(core, 1, 1)
    notices: list[NoticeKind] = []
    for number in range(6):
        outcome = Outcome(1, number, 0, 7)
        launch = Launch(1, number + 1, [], Source.NONE, DEPTH, 0)
        core.handle(TargetFrames(1, [outcome, launch]))
        frames = [frame for link in core.step().links for frame in link.frames]
        notices += [frame.kind for frame in frames if isinstance(frame, Notice)]
        core.check_integrity()
        if notices:
            break
    assert (number, notices) == (4, [NoticeKind.BUSY])
    assert not core._links[1].sequences


def test_a_draft_holds_no_more_than_its_bound_and_serves_other_targets(tmp_path: Path) -> None:
    with (
        draft(tmp_path, model=None) as endpoint,
        endpoint.channel() as one,
        endpoint.channel() as two,
    ):
        attacker, other = HandMadeLink(one), HandMadeLink(two)
        for number in range(MOST_TOKENS // 100_000 + 2):
            attacker.open(number, [5 + (number + i) % 1000 for i in range(100_000)])
        other.open(1, [7 + i % 10 for i in range(60)])
        other.wait_for(1, HANG_SECONDS)
        wait_until(lambda: attacker.refused, "what is too much is refused")
        assert not other.refused


@pytest.mark.parametrize("length", [100, 3 * INDEXED_AT_ONCE])
def test_a_target_looks_back_in_a_long_text_when_it_has_been_indexed(length: int) -> None:
    prompt = [5 + i % 50 for i in range(length)]
    sampling = SamplingParams(seed=1)
    sequence = Sequence(1, prompt, [], sampling, StopRules(50), None, [b""] * 100)
    session = EndpointSession(100, 5)
    state = SequenceSpeculation(sequence, SpeculationRequest(), PlainDecoding(), session)
    found = [state.look_back(4) for _ in range(4)]
    assert [bool(each) for each in found] == [length < INDEXED_AT_ONCE] * 2 + [True] * 2
