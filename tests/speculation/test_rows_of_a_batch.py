"""Eight rows in one forward: what one row missed costs no other row its hit.

Counters of each row: hits that were discarded, that were held back by a wait, and whose tokens the
draft computed once more. And the rounds of a row are those that it has when it is alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssd_draft.planning.sequence import DraftRoundPhase
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Source
from ssd_engine.speculation.speculation import NOTHING
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.missed_rows import MissedRows
from tests.harness import Request, Result, run
from tests.simulation import Simulation
from tests.speculation.scenarios import Pair, stories
from tests.suite.scale import FULL

ROWS, TOKENS, DEPTH = 8, (60 if FULL else 30), 4
FAN_OUT = (2, 2, 1, 1, 3)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield stories()


def requests() -> list[Request]:
    speculation = SpeculationRequest(Mode.SSD, depth=DEPTH)
    return [
        Request(
            [0, 3, *range(300 + 40 * i, 312 + 40 * i)],
            SamplingParams(seed=i, temperature=0.8),
            TOKENS,
            speculation=speculation,
        )
        for i in range(ROWS)
    ]


def simulation(pair: Pair, **options: Any) -> Simulation:
    """A draft that is always done in time; the same outcomes are prepared for in every round."""
    chosen = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False, **options)
    return Simulation(pair.target, pair.drafts[0], chosen, draft_steps=(16, 16), fan_out=FAN_OUT)


def rounds(result: Result) -> dict[str, int]:
    stats = result.speculation
    assert stats is not None
    names = ("rounds", "hits", "late", "length_misses", "token_misses", "cache_rounds")
    names += ("plain_rounds", "drafted_tokens", "accepted_tokens", "rejected_rounds")
    return {name: getattr(stats, name) for name in names}


def test_the_rounds_of_a_row_are_those_it_has_alone(pair: Pair) -> None:
    instant: dict[str, Any] = {"wait_seconds": 0.0, "backup": Backup.NONE}
    together = run(simulation(pair, **instant).core, requests())
    for number in range(0, ROWS, 1 if FULL else 4):
        [alone] = run(simulation(pair, **instant).core, [requests()[number]])
        assert alone.tokens == together[number].tokens
        assert rounds(alone) == rounds(together[number])
    for result in together:
        stats = rounds(result)
        assert stats["hits"]
        assert stats["token_misses"] + stats["length_misses"]
        assert stats["hits"] == stats["cache_rounds"]


class Watch:
    """Sees each look-up with what it found, and each forward of the draft."""

    def __init__(self, simulation: Simulation, patch: pytest.MonkeyPatch) -> None:
        self.harm: Counter[str] = Counter()
        self.beside_a_miss: Counter[int] = Counter()  # hits of sequences where another row missed
        self._simulation = simulation
        patch.setattr(SpeculationCoordinator, "take", self._watch_take(SpeculationCoordinator.take))
        patch.setattr(ModelSequence, "next_parts", self._watch_parts(ModelSequence.next_parts))

    def _watch_take(
        self, take: Callable[..., list[RowSpeculation]]
    ) -> Callable[..., list[RowSpeculation]]:
        def watched(
            speculator: SpeculationCoordinator, sequences: list[Sequence]
        ) -> list[RowSpeculation]:
            found = [self._found(speculator, sequence) for sequence in sequences]
            begin = self._simulation.now
            rows = take(speculator, sequences)
            for row, tokens in zip(rows, found, strict=True):
                if tokens:
                    self._hit(row, tokens, not all(found), self._simulation.now > begin)
            return rows

        return watched

    def _found(self, speculator: SpeculationCoordinator, sequence: Sequence) -> list[int]:
        session = speculator._sequences[sequence.id].session
        return session.branches.find(*session.decided) if session.decided else []

    def _hit(
        self, row: RowSpeculation, found: list[int], beside_a_miss: bool, waited: bool
    ) -> None:
        self.beside_a_miss[row.state.sequence.id] += beside_a_miss
        taken = row.speculation.tokens if row.source is Source.CACHE else []
        self.harm.update(discarded=taken != found[: row.wanted], delayed=waited)

    def _watch_parts(self, parts_of: Callable[..., list[Part]]) -> Callable[..., list[Part]]:
        def watched(state: ModelSequence, *rest: Any) -> list[Part]:
            parts, sequence = parts_of(state, *rest), state.sequence
            if sequence.phase is DraftRoundPhase.VERIFYING and sequence.source is Source.CACHE:
                again = sum(len(part.tokens) for part in parts if isinstance(part, Chunk))
                self.harm["tokens drafted again"] += again
            return parts

        return watched


def watch(pair: Pair, patch: pytest.MonkeyPatch) -> Watch:
    """Each row that misses would wait for its branch, if only it were alone."""
    simulated = simulation(pair, wait_seconds=0.05, backup=Backup.JUST_IN_TIME)
    watched = Watch(simulated, patch)
    run(simulated.core, requests())
    return watched


def test_no_hit_is_discarded_delayed_or_drafted_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch(pair, monkeypatch)
    assert watched.harm.total() == 0, watched.harm
    hits = watched.beside_a_miss
    assert len(+hits) == ROWS
    assert hits.total() >= ROWS * TOKENS // 10, hits


def wait_for_any_miss(patch: pytest.MonkeyPatch) -> None:
    def wait(self: MissedRows, rows: list[RowSpeculation]) -> None:
        missed = [row for row in rows if row.missed]
        if missed:
            self._wait_for(missed, 0.05)

    patch.setattr(MissedRows, "wait", wait)


def one_miss_is_everybodys(patch: pytest.MonkeyPatch) -> None:
    def guess(self: MissedRows, rows: list[RowSpeculation]) -> None:
        if any(row.missed for row in rows):
            for row in rows:
                row.speculation, row.source = NOTHING, Source.NONE

    patch.setattr(MissedRows, "guess", guess)


def branches_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelSequence, "move_branch", lambda self: [])


@pytest.mark.full
@pytest.mark.parametrize(
    "mutant", [wait_for_any_miss, one_miss_is_everybodys, branches_are_not_kept]
)
def test_harm_is_counted(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    assert watch(pair, monkeypatch).harm.total() > 0
