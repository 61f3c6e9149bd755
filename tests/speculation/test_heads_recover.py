"""After a restart in the middle of a text, and after prefix hits, a head is as good as before."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from tests.clockwork import VOCAB
from tests.harness import Request, Result, run
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
    pair: Pair, wait_seconds: float = 0.02, steps: int = 12, **how: Any
) -> Simulation:
    options = SpeculationOptions(
        depth=DEPTH,
        adapt_depth=False,
        backup=Backup.JUST_IN_TIME if wait_seconds else Backup.NONE,
        wait_seconds=wait_seconds,
        auto_off=False,
    )
    return Simulation(pair.target, pair.drafts[0], options, draft_steps=(steps, steps), **how)


def asked(seed: int, prompt: int, tokens: int = TOKENS) -> Request:
    ids = [(5 * i * i + 11 * seed) % VOCAB for i in range(prompt)]
    return Request(ids, max_tokens=tokens, speculation=SSD)


def accepted(result: Result) -> float:
    """Tokens that were right, of each round with a speculation."""
    stats = result.speculation
    assert stats is not None
    rounds = stats.cache_rounds + stats.just_in_time_rounds
    assert rounds > 5
    return stats.accepted_tokens / rounds


def undisturbed(pair: Pair, request: Request) -> float:
    return accepted(run(simulation_of(pair).core, [request])[0])


def restart(simulation: Simulation, down_for: int) -> None:
    draft = simulation.drafts[0]
    simulation._lose(draft)
    draft.core, draft.down_for = draft.make(), down_for


def test_after_a_restart_in_the_middle_of_a_text(pair: Pair) -> None:
    request = asked(1, 40)
    usual = undisturbed(pair, request)
    simulation = simulation_of(pair)
    go_on, forwards = simulation._misbehave, itertools.count(1)

    def misbehave() -> None:
        if next(forwards) == 8:
            restart(simulation, down_for=2)
        go_on()

    simulation._misbehave = misbehave  # type: ignore[method-assign]
    [result] = run(simulation.core, [request])
    assert result.tokens == pair.plain(request).tokens
    assert simulation.drafts[0].epoch == 2
    assert accepted(result) >= NEARLY * usual
    assert simulation.speculator.feed.counters.missed == 0  # all of it was told again


@pytest.mark.parametrize("new_draft", [False, True], ids=["cached on both sides", "restarted"])
@pytest.mark.parametrize("keep", [0, 1 << 22], ids=["nothing kept", "kept"])
def test_after_a_prefix_hit(pair: Pair, keep: int, new_draft: bool) -> None:
    """A prompt whose beginning the target has cached; the head has, or has not."""
    usual = undisturbed(pair, asked(2, 109))
    simulation = simulation_of(pair, keep_features=keep)
    run(simulation.core, [asked(2, 100, 8)])
    if new_draft:
        restart(simulation, down_for=0)
        simulation._reconnect(simulation.drafts[0])
    again = Request(asked(2, 100).prompt + [7, 9, 11] * 3, max_tokens=TOKENS, speculation=SSD)
    [result] = run(simulation.core, [again])
    assert result.tokens == pair.plain(again).tokens
    assert result.cached_tokens >= 96
    assert accepted(result) >= NEARLY * usual
    feed = simulation.speculator.feed
    assert bool(len(feed.kept)) == bool(keep)
    assert feed.counters.missed == 0
    if new_draft:  # rows of the cached prefix were computed once more, unless they were kept
        assert (feed.counters.reread == 0) == bool(keep)


@pytest.mark.parametrize("replay_rows", [0, 4], ids=["prefilled", "replayed in steps"])
def test_after_a_move(pair: Pair, replay_rows: int) -> None:
    """A text that another target has begun: all of it is told, however it is computed again."""
    request = asked(5, 42)
    usual, whole = undisturbed(pair, request), pair.plain(request).tokens
    simulation = simulation_of(pair, replay_rows=replay_rows)
    [rest] = run(simulation.core, [replace(request, generated=whole[:17])])
    assert rest.tokens == whole[17:]
    assert accepted(rest) >= NEARLY * usual
    feed = simulation.speculator.feed
    assert (feed.counters.missed, feed.counters.reread, len(feed._fed)) == (0, 0, 0)


@pytest.mark.parametrize(
    "faults",
    [Faults(lose_features=1.0), Faults(delay_features=1.0)],
    ids=["they never come", "they come late"],
)
def test_features_never_hold_a_round(pair: Pair, faults: Faults) -> None:
    """By the target's clock, in which nothing but forwards takes time here."""
    simulation = simulation_of(pair, wait_seconds=0.0, steps=4, faults=faults)
    request = asked(3, 40)
    [result] = run(simulation.core, [request])
    assert result.tokens == pair.plain(request).tokens
    assert sum(simulation.befallen.values()) > 0
    forwards = simulation.core.stats().forwards + 1  # and the prompt's
    assert simulation.now == pytest.approx(forwards * VERIFY_SECONDS)
