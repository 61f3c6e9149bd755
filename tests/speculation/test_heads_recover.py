"""After a restart in the middle of a text, and after prefix hits, a head is as good as before."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from tests.clockwork import VOCAB
from tests.harness import Request, Result, make_core, run
from tests.simulation import VERIFY_SECONDS, Faults, Simulation
from tests.speculation.scenarios import Pair, clockwork_pair

DEPTH = 4
TOKENS = 120
SSD = SpeculationRequest(Mode.SSD, depth=DEPTH)
NEARLY = 0.95  # of what it is undisturbed


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with torch.backends.mkldnn.flags(enabled=False):  # as in the services
        yield clockwork_pair(VOCAB, tmp_path_factory.mktemp("clockwork"))


def simulation_of(
    pair: Pair, keep: int = 0, window: int = 1024, replay_rows: int = 0
) -> Simulation:
    options = SpeculationOptions(
        depth=DEPTH,
        adapt_depth=False,
        backup=Backup.JUST_IN_TIME,
        wait_seconds=0.02,
        auto_off=False,
    )
    return Simulation(
        pair.target,
        pair.drafts[0],
        options,
        draft_steps=(12, 12),
        feature_window=window,
        keep_features=keep,
        replay_rows=replay_rows,
    )


def asked(seed: int, prompt: int, tokens: int = TOKENS) -> Request:
    ids = [(5 * i * i + 11 * seed) % VOCAB for i in range(prompt)]
    return Request(ids, max_tokens=tokens, speculation=SSD)


def plain(pair: Pair, request: Request) -> list[int]:
    off = Request(request.prompt, request.sampling, request.max_tokens)
    return run(make_core(pair.target), [off])[0].tokens


@dataclass
class Lengths:
    """Rounds, and tokens that were right, since it was made."""

    simulation: Simulation

    def __post_init__(self) -> None:
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        totals = [self.simulation.speculator.totals]
        totals += [s.stats for s in self.simulation.speculator._sequences.values()]
        rounds = sum(each.cache_rounds + each.just_in_time_rounds for each in totals)
        return rounds, sum(each.accepted_tokens for each in totals)

    def since(self) -> tuple[int, int]:
        """Rounds that had a speculation, and their tokens that were right."""
        rounds, tokens = (b - a for a, b in zip(self._before, self._now(), strict=True))
        return rounds, tokens

    def accepted(self) -> float:
        """Tokens of a round that had a speculation."""
        rounds, tokens = self.since()
        assert rounds > 5
        return tokens / rounds


def undisturbed(pair: Pair, request: Request) -> float:
    simulation = simulation_of(pair)
    lengths = Lengths(simulation)
    run(simulation.core, [request])
    return lengths.accepted()


def test_after_a_restart_in_the_middle_of_a_text(pair: Pair) -> None:
    request = asked(1, 40)
    usual = undisturbed(pair, request)
    simulation, lengths = simulation_of(pair), []
    draft, forward, count = simulation.drafts[0], simulation._misbehave, 0

    def misbehave() -> None:
        nonlocal count
        count += 1
        if count == 8:
            simulation._lose(draft)
            draft.core, draft.down_for = draft.make(), 2
            lengths.append(Lengths(simulation))
        forward()

    simulation._misbehave = misbehave  # type: ignore[method-assign]
    [result] = run(simulation.core, [request])
    assert result.tokens == plain(pair, request)
    assert draft.epoch == 2
    assert lengths[0].accepted() >= NEARLY * usual
    assert simulation.speculator.feed.counters.missed == 0  # all of it was told again


def second_wave(pair: Pair, keep: int, new_draft: bool) -> tuple[Simulation, float, Result]:
    """A prompt whose beginning the target has cached; the head has, or has not."""
    simulation = simulation_of(pair, keep)
    run(simulation.core, [asked(2, 100, 8)])
    if new_draft:
        draft = simulation.drafts[0]
        simulation._lose(draft)
        draft.core = draft.make()
        draft.epoch += 1
        simulation._connect(draft)
    again = Request(asked(2, 100).prompt + [7, 9, 11] * 3, max_tokens=TOKENS, speculation=SSD)
    lengths = Lengths(simulation)
    [result] = run(simulation.core, [again])
    assert result.tokens == plain(pair, again)
    assert result.cached_tokens >= 96
    return simulation, lengths.accepted(), result


@pytest.mark.parametrize("new_draft", [False, True], ids=["cached on both sides", "restarted"])
@pytest.mark.parametrize("keep", [0, 1 << 22], ids=["nothing kept", "kept"])
def test_after_a_prefix_hit(pair: Pair, keep: int, new_draft: bool) -> None:
    usual = undisturbed(pair, asked(2, 109))
    simulation, length, _ = second_wave(pair, keep, new_draft)
    assert length >= NEARLY * usual
    feed = simulation.speculator.feed
    assert bool(len(feed.kept)) == bool(keep)
    assert feed.counters.missed == 0
    if new_draft:  # rows of the cached prefix were computed once more, unless they were kept
        assert (feed.counters.reread == 0) == bool(keep)


@pytest.mark.parametrize("replay_rows", [0, 4], ids=["prefilled", "replayed in steps"])
def test_after_a_move(pair: Pair, replay_rows: int) -> None:
    """A text that another target has begun: all of it is told, however it is computed again."""
    request = asked(5, 42)
    usual, whole = undisturbed(pair, request), plain(pair, request)
    simulation = simulation_of(pair, replay_rows=replay_rows)
    lengths = Lengths(simulation)
    moved = Request(request.prompt, max_tokens=TOKENS, generated=whole[:17], speculation=SSD)
    [rest] = run(simulation.core, [moved])
    assert rest.tokens == whole[17:]
    assert lengths.accepted() >= NEARLY * usual
    assert simulation.speculator.feed.counters.missed == 0
    assert simulation.speculator.feed.counters.reread == 0
    assert not simulation.speculator.feed._fed


@pytest.mark.parametrize("come", [False, True], ids=["they never come", "they come late"])
def test_features_never_hold_a_round(pair: Pair, come: bool) -> None:
    """By the target's clock, in which nothing but forwards takes time here."""
    options = SpeculationOptions(
        depth=DEPTH, adapt_depth=False, backup=Backup.NONE, wait_seconds=0.0, auto_off=False
    )
    faults = Faults(delay_features=1.0) if come else Faults(lose_features=1.0)
    simulation = Simulation(pair.target, pair.drafts[0], options, draft_steps=(4, 4), faults=faults)
    request = asked(3, 40)
    [result] = run(simulation.core, [request])
    assert result.tokens == plain(pair, request)
    assert sum(simulation.befallen.values()) > 0
    forwards = simulation.core.stats().forwards + 1  # and the prompt's
    assert simulation.now == pytest.approx(forwards * VERIFY_SECONDS)


def test_a_draft_without_heads_has_nothing_watched(pair: Pair) -> None:
    options = SpeculationOptions(depth=DEPTH, auto_off=False)
    simulation = Simulation(pair.target, None, options)
    pair.target.watch(())
    run(simulation.core, [asked(4, 20, 20)])
    assert simulation.speculator.feed.watched == ()
    assert pair.target._watched == ()
    assert not simulation.speculator.feed._fed
