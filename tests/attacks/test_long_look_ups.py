"""Long sequences at a draft that looks n-grams up: nobody waits for them to be indexed."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from tests.processes import draft as start_draft
from tests.waiting import HANG_SECONDS, wait_until
from tools.attack.attackers import HandMadeLink

LONG, CHUNK, ROWS = 20_000, 64, 256
DEPTH = 3


def opened(number: int, length: int) -> Open:
    prompt = pack_tokens([5 + i % 50 for i in range(length)])
    params = SamplingParams(seed=1, temperature=0.0)
    return Open(number, 0, prompt, b"", [], 10**6, params, Verification.COUPLED, 1.0, DEPTH, 0)


class Draft:
    """One that looks n-grams up, and has two targets."""

    def __init__(self, max_tokens: int = 10**6) -> None:
        clock = itertools.count(0.0, 1e-6).__next__
        speculator = NgramSpeculator(max_tokens)
        planner = Planner(DEPTH, 8)
        self.core = DraftCore(speculator, lambda _: planner, 64, None, ROWS, CHUNK, clock=clock)
        for link in (1, 2):
            self.core.handle(TargetLinkUp(link, DEPTH))

    def step(self, link: int = 0, *frames: Any) -> list[NoticeKind]:
        """What it notifies of after these frames of a link."""
        if frames:
            self.core.handle(TargetFrames(link, list(frames)))
        said = [frame for out in self.core.step().links for frame in out.frames]
        self.core.check_integrity()
        return [frame.kind for frame in said if isinstance(frame, Notice)]

    def sequences(self, link: int) -> Mapping[int, Any]:
        return self.core._links[link].sequences

    def steps_until_complete(self, link: int, number: int) -> int:
        for steps in range(10_000):
            found = self.sequences(link).get(number)
            if found is not None and found.complete:
                return steps
            self.step()
        raise AssertionError("it never is")


def test_a_short_sequence_does_not_wait_for_the_long_ones_of_another_target() -> None:
    draft = Draft()
    draft.step(1, *(opened(i, LONG) for i in range(10)))
    draft.core.handle(TargetFrames(2, [opened(1, 30)]))
    assert draft.steps_until_complete(2, 1) <= 2


def test_a_step_indexes_no_more_than_its_rows() -> None:
    draft = Draft()
    draft.step(1, opened(1, LONG))
    sequence = draft.sequences(1)[1]
    assert len(sequence.state.index) <= ROWS
    draft.steps_until_complete(1, 1)
    assert (len(sequence.state.index), bool(sequence.branches)) == (LONG, True)


def test_what_is_held_is_bounded() -> None:
    draft = Draft(max_tokens=2 * LONG)
    said = draft.step(1, *(opened(i, LONG) for i in range(3)))
    assert said in ([NoticeKind.BUSY], [NoticeKind.LOST])
    assert sum(each.num_committed for each in draft.sequences(1).values()) <= 2 * LONG
    assert draft.step(2, opened(9, 3 * LONG)) == [NoticeKind.REFUSED]


def test_a_sequence_that_grows_beyond_the_bound_is_given_up() -> None:
    draft = Draft(max_tokens=34)
    draft.core.handle(TargetFrames(1, [opened(1, 30)]))
    draft.steps_until_complete(1, 1)
    said = [
        draft.step(1, Outcome(1, i, 0, 7), Launch(1, i + 1, [], Source.NONE, DEPTH, 0))
        for i in range(5)
    ]
    assert said == 4 * [[]] + [[NoticeKind.BUSY]]
    assert not draft.sequences(1)


def test_a_draft_holds_no_more_than_its_bound_and_serves_other_targets(tmp_path: Path) -> None:
    with start_draft(tmp_path, model=None) as at, at.channel() as one, at.channel() as two:
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
    found = [bool(state.look_back(4)) for _ in range(4)]
    assert found == [length < INDEXED_AT_ONCE] * 2 + [True] * 2
