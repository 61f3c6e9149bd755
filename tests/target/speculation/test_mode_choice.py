"""A request that names no mode gets the one that measures fastest; ssd is left for sync where that
is faster. Time passes only here: what a round of each mode takes and gives is written down."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Launch, Open, Source, TargetFrame
from ssd_target.config import TargetConfig, default_mode, modes
from ssd_target.front.speculation_requests import speculation_stats
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.scheduling.sequence import Sequence as TargetSequence
from ssd_target.speculation import sync as sync_module
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints import draft_endpoints as endpoints_module
from ssd_target.speculation.endpoints.payoff import (
    FIRST_ROUNDS,
    STEADY_STEPS,
    Payoff,
    TrialPhase,
)
from ssd_target.speculation.sync_drafter import DraftRow
from tests.harness import Request, run
from tests.simulation import Faults, Simulation
from tests.speculation.scenarios import stories
from tests.target.sequences import make_sequence
from tests.target.speculation.rounds import end_plain_round

AUTO, OFF, SYNC, SSD = Mode.AUTO, Mode.OFF, Mode.SYNC, Mode.SSD
LINK, EPOCH, DEPTH = 1, 1, 3
EVEN = {OFF: 1, SYNC: 3, SSD: 3}  # tokens of a round, so that milliseconds decide
FASTEST = {  # milliseconds of a round
    OFF: {OFF: 10, SYNC: 50, SSD: 40},
    SYNC: {OFF: 10, SYNC: 15, SSD: 25},
    SSD: {OFF: 10, SYNC: 20, SSD: 12},
}


class ScriptedDrafter:
    """Has two tokens for whoever asks; what it sees for the first time, it must read first."""

    reads_features = False

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def is_behind(self, sequence: TargetSequence) -> bool:
        is_new = sequence.id not in self._seen
        self._seen.add(sequence.id)
        return is_new

    def draft(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            row.tokens = [5, 6][: row.depth]

    def end(self, sequence_id: int) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass
class World:
    """An engine's speculation without an engine: rounds take and give what is written down."""

    milliseconds: Callable[[Mode, int], float]  # of a round, by its mode and the rows that run
    auto_off: bool = True
    drafts: bool = True  # a draft model is inside
    endpoints: bool = True  # there may be some
    now: float = 0.0
    sent: list[TargetFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = SpeculationOptions(
            depth=DEPTH,
            backup=Backup.NONE,
            auto_off=self.auto_off,
            link_timeout=1e9,
            endpoints=self.endpoints,
        )
        self.speculator = SpeculationCoordinator(
            options,
            100,
            send=lambda link, epoch, frames: self.sent.extend(frames),
            drafter=ScriptedDrafter() if self.drafts else None,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.sequences: list[TargetSequence] = []
        self.numbers = itertools.count()

    def link(self) -> None:
        self.speculator.endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 64, 1 << 20, DEPTH))

    def submit(self, mode: Mode, count: int = 1) -> None:
        for _ in range(count):
            sequence = make_sequence(next(self.numbers), [1, 2], mode=mode, depth=DEPTH)
            self.speculator.begin(sequence)
            end_plain_round(self.speculator, sequence)
            self.sequences.append(sequence)

    def run(self, rounds: int) -> list[Mode]:
        """The modes that the first sequence's rounds went by."""
        return [self._round() for _ in range(rounds)]

    def _round(self) -> Mode:
        speculator = self.speculator
        rows = speculator.take(self.sequences)
        speculator.launch(rows)
        speculator.endpoints.flush()
        self.now += max(self.milliseconds(row.strategy.mode, len(rows)) for row in rows) / 1000
        measured = speculator.metrics.measure(rows)
        for sequence in self.sequences:
            end_plain_round(speculator, sequence)
        given = [EVEN[row.strategy.mode] for row in rows]
        speculator.metrics.observe(rows, measured.row_seconds, given, measured)
        speculator.check_integrity()
        return rows[0].strategy.mode

    def stats(self) -> SpeculationStats:
        stats = self.speculator.end(self.sequences.pop(0).id)
        assert stats is not None
        return stats


def world(fastest: Mode, mode: Mode = AUTO, linked: bool = True, **options: bool) -> World:
    made = World(lambda mode, rows: FASTEST[fastest][mode], **options)
    if linked:
        made.link()
    made.submit(mode)
    return made


@pytest.mark.parametrize("fastest", [OFF, SYNC, SSD])
def test_a_request_that_names_no_mode_gets_the_fastest(fastest: Mode) -> None:
    running = world(fastest)
    went = running.run(800)
    assert set(went) == {OFF, SYNC, SSD}  # nothing is believed untried
    assert went.count(fastest) > 0.85 * len(went)
    stats = running.stats()
    assert all(stats.rounds_in(mode) == went.count(mode) for mode in (OFF, SYNC, SSD))
    assert speculation_stats(SpeculationRequest(AUTO), stats).mode == int(fastest)


def test_a_slow_mode_is_left_though_somebody_always_catches_up() -> None:
    """Short requests, one after the other: reading their texts is a part of the price."""
    running = world(OFF, linked=False)
    running.submit(AUTO, 15)
    went = []
    for _ in range(400):
        running.speculator.end(running.sequences.pop(0).id)
        running.submit(AUTO)
        went += running.run(1)
    assert went.count(OFF) > 0.6 * len(went)


def test_a_mode_that_is_not_possible_is_not_tried() -> None:
    """Who can have no endpoint misses none."""
    running = world(SYNC, linked=False, endpoints=False)
    assert set(running.run(400)) == {OFF, SYNC}
    stats = running.stats()
    assert (stats.fallbacks, stats.disconnected) == ({}, 0)
    assert set(world(SYNC, linked=False).run(400)) == {OFF, SYNC}
    assert set(world(SSD, drafts=False).run(400)) == {OFF, SSD}


def test_a_link_that_is_down_is_left_at_once() -> None:
    running = world(SSD)
    assert running.run(100)[-1] is SSD
    running.speculator.endpoints.disconnected(LINK, EPOCH)
    assert running.run(1) == [SYNC]  # the fastest of what is left
    running.link()
    assert SSD in running.run(3)


@pytest.mark.parametrize(
    ("fastest", "mode", "auto_off"),
    [(OFF, OFF, True), (SYNC, OFF, True), (SSD, OFF, True), (OFF, SYNC, False), (OFF, SSD, False)],
)
def test_a_mode_that_is_named_is_kept(fastest: Mode, mode: Mode, auto_off: bool) -> None:
    """Plain decoding always, others where the operator wants that."""
    running = world(fastest, mode, auto_off=auto_off)
    assert set(running.run(100)) == {mode}
    if mode is SSD:
        running.speculator.endpoints.disconnected(LINK, EPOCH)
        assert set(running.run(3)) == {OFF}


@pytest.mark.parametrize(
    ("mode", "fastest", "rows"), [(SYNC, OFF, 1), (SYNC, OFF, 8), (SYNC, SYNC, 1), (SSD, SYNC, 1)]
)
def test_a_mode_that_is_named_is_left_where_another_is_faster(
    mode: Mode, fastest: Mode, rows: int
) -> None:
    """Sync for plain decoding, ssd for sync."""
    running = world(fastest, mode=mode)
    running.submit(mode, count=rows - 1)
    went = running.run(1200)
    assert {mode, OFF if mode is SYNC else SYNC} <= set(went)  # a few to compare
    assert went.count(fastest) > 0.85 * len(went)
    if fastest is OFF:
        assert running.stats().fallbacks["does not pay"] > 0


def test_rounds_to_compare_with_are_not_slowed_by_the_endpoint() -> None:
    """It is told their speculations, and that nothing needs to be prepared meanwhile."""
    running = world(SSD)
    running.run(100)
    depths = {(frame.depth > 0) for frame in running.sent if isinstance(frame, Launch | Open)}
    assert depths == {True, False}
    launches = [frame for frame in running.sent if isinstance(frame, Launch)]
    assert all(frame.depth == 0 for frame in launches if frame.speculation)  # a drafter's
    assert {frame.source for frame in launches} <= {Source.NONE, Source.NGRAM}


def test_what_pays_alone_may_not_pay_in_a_batch() -> None:
    """Drafting takes as long as it has rows; alone it is worth it."""

    def milliseconds(mode: Mode, rows: int) -> float:
        return 10 + (10 * rows if mode is SYNC else 0)

    running = World(milliseconds)
    running.submit(AUTO)
    assert running.run(200).count(SYNC) > 180
    running.submit(AUTO, count=7)
    running.run(STEADY_STEPS + 2 * FIRST_ROUNDS)
    assert running.run(100).count(OFF) == 100
    for _ in range(7):
        running.stats()
    running.run(STEADY_STEPS)
    assert running.run(100).count(SYNC) > 90  # as it was found then


def test_a_verdict_is_kept_through_a_few_steps_of_another_size() -> None:
    payoff = Payoff()
    while payoff.phase is not TrialPhase.OFF:
        payoff.about_to_run(1)
        payoff.observe(payoff.speculates, 1, 0.02 if payoff.speculates else 0.01)
    for _ in range(STEADY_STEPS):
        payoff.about_to_run(8)
        payoff.observe(False, 1, 9.0)  # no evidence: of another size
    assert payoff.phase is TrialPhase.OFF
    assert payoff.current.without.value == pytest.approx(100)
    payoff.about_to_run(8)
    assert payoff.phase is TrialPhase.ON  # nothing is known of eight


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({}, OFF),
        ({"draft": ("localhost:1",)}, AUTO),
        ({"draft_model": "d"}, AUTO),
        ({"allow_draft": ("localhost:1",)}, OFF),
        ({"draft": ("localhost:1",), "draft_model": "d", "auto_off": False}, SSD),
        ({"draft_model": "d", "auto_off": False}, SYNC),
        ({"draft": ("localhost:1",), "draft_model": "d", "mode": "sync"}, SYNC),
        ({"draft": ("localhost:1",), "draft_model": "d", "mode": "off"}, OFF),
    ],
)
def test_what_a_server_does_with_requests_that_name_no_mode(
    options: dict[str, Any], default: Mode
) -> None:
    config = TargetConfig("m", **options)
    assert default_mode(config) is default
    assert AUTO not in modes(config)


class Restless(Payoff):
    """Thinks otherwise in every step."""

    dice = random.Random(5)

    def about_to_run(self, num_rows: int) -> None:
        self.current.phase = self.dice.choice(list(TrialPhase))

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None: ...


def test_the_text_is_that_of_plain_decoding_however_the_choice_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real models, and links that break."""
    for module in (sync_module, endpoints_module):
        monkeypatch.setattr(module, "Payoff", Restless)
    sampling = [SamplingParams(seed=i, temperature=0.8 * i) for i in range(2)]
    prompts = [[0, 3, *range(300 + 40 * i, 312 + 40 * i)] for i in range(2)]

    def texts(*asked: Mode) -> tuple[list[list[int]], SpeculationStats]:
        options = SpeculationOptions(depth=DEPTH, adapt_depth=False)
        simulated = Simulation(
            pair.target,
            pair.drafts[0],
            options,
            faults=Faults(drop_link=0.02, lost=0.02),
            sync=pair.drafts[-1],
        )
        requests = [
            Request(prompts[i], sampling[i], 60, speculation=SpeculationRequest(mode, depth=DEPTH))
            for i, mode in enumerate(asked)
        ]
        begin = simulated.now
        results = run(simulated.core, requests)
        spent = simulated.speculator.totals
        rounds_s = (spent.cache_round_micros + spent.other_round_micros) / 1e6
        assert 0 < rounds_s <= len(requests) * (simulated.now - begin)
        return [result.tokens for result in results], simulated.speculator.totals

    with torch.backends.mkldnn.flags(enabled=False):
        pair = stories()
        plain, _ = texts(OFF, OFF)
        switched, met = texts(AUTO, SSD)
    assert switched == plain
    assert all(met.rounds_in(mode) >= 10 for mode in (OFF, SYNC, SSD))
    assert met.hits
    assert met.cache_tokens
    assert met.rejected_rounds
    assert met.full_rounds
    assert met.accepted_tokens > met.cache_tokens  # of the draft model inside, too
