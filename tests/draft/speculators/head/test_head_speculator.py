"""A head's sequences: what is told of them and what is not, room, prefixes, and strange rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.head.sequence import MOST_UNTOLD, HeadSequence
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Close
from ssd_engine.speculation.verification import Verification
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from tests.clockwork import VOCAB
from tests.draft.speculators.head.head_world import (
    DEPTH,
    HeadWorld,
    Pair,
    Told,
    chain,
    opening,
)
from tests.harness import BLOCK


def play(world: HeadWorld, told: Told, rounds: int, tells: bool = True) -> float:
    """Acceptance over some rounds, each of which ends when the draft has nothing left to do."""
    drafted, accepted = told.drafted, told.accepted
    for _ in range(rounds):
        world.play(told, tells=tells)
    return (told.accepted - accepted) / max(1, told.drafted - drafted)


def begin(world: HeadWorld, key: int = 1, **how: object) -> Told:
    told = world.open(key, **how)  # type: ignore[arg-type]
    world.settle()
    world.tell(told)
    world.settle()
    return told


def state_of(world: HeadWorld, key: int = 1) -> HeadSequence:
    state: HeadSequence = world.sequence(key).state
    return state


# Acceptance


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_the_head_does_not_know_is_never_drafted_nor_guessed(
    few_tokens: Pair, temperature: float
) -> None:
    world = HeadWorld(few_tokens)
    told = begin(world, temperature=temperature)
    known = known_tokens(few_tokens)
    for _ in range(10):
        world.play(told)
        for accepted, token in world.sequence().branches:
            assert token in known, accepted
    drafted = [token for tokens in world.pushed.values() for token in tokens]
    assert len(drafted) > 100
    assert set(drafted) <= known
    assert len(known) == 40


class Ending:
    """A grammar that allows what the head does not know at every third token, and else all."""

    def __init__(self, known: set[int]) -> None:
        chosen = np.isin(np.arange(VOCAB), [*known], invert=True)
        self._unknown = np.packbits(chosen, bitorder="little")
        self._all = np.full_like(self._unknown, 255)

    def allowed(self, output: list[int], tail: list[int]) -> Any:
        return self._all if (len(output) + len(tail)) % 3 else self._unknown


@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION])
def test_where_a_grammar_leaves_nothing_that_the_head_knows_it_drafts_no_further(
    few_tokens: Pair, verification: Verification
) -> None:
    world = HeadWorld(few_tokens)
    told = world.open(verification=verification, temperature=1.0)
    world.step()
    known = known_tokens(few_tokens)
    world.sequence().grammar = Ending(known)  # type: ignore[assignment]
    world.tell(told)
    world.settle()
    lengths = set()
    for _ in range(6):
        begin = len(told.tokens) - len(told.prompt)  # tokens of the output
        for accepted, token in world.sequence().branches:
            drafted = world.pushed.get((told.key, told.round, accepted, token), [])
            first = begin + accepted
            assert {token, *drafted} <= known
            assert all((first + i) % 3 for i in range(1 + len(drafted)))
            assert len(drafted) == min(DEPTH, (-first) % 3 - 1)
            lengths.add(len(drafted))
        world.decide(told, 0, 63)
        world.tell(told)
        world.settle()
        world.launch(told, (0, 63))
        world.settle()
    assert lengths == {0, 1}


def known_tokens(pair: Pair) -> set[int]:
    head = pair.make_head(num_blocks=64).model.head_weights.target_tokens
    assert head is not None
    return set(head.tolist())


# What is told


def test_without_features_the_head_goes_on_for_a_while(clockwork: Pair) -> None:
    """Beyond that it drafts nothing, until it is told again."""
    world = HeadWorld(clockwork)
    told = begin(world)
    assert play(world, told, 3, tells=False) == 1.0
    while len(told.tokens) - 1 - told.num_told <= MOST_UNTOLD:
        world.play(told, tells=False)
    pushed = len(world.pushed)
    world.play(told, tells=False)
    world.play(told, tells=False)
    assert len(world.pushed) == pushed
    world.tell(told)
    world.settle()
    assert len(world.pushed) > pushed
    assert play(world, told, 4) > 0.9


@pytest.mark.parametrize("lost", [3, MOST_UNTOLD + 40])
def test_a_gap_in_what_is_told(clockwork: Pair, lost: int) -> None:
    """A few rows are the head's own; after more of them its text begins anew."""
    world = HeadWorld(clockwork)
    told = begin(world)
    while len(told.tokens) - 1 - told.num_told < lost:
        world.play(told, tells=False)
    told.num_told = len(told.tokens) - 1
    base = state_of(world).base
    play(world, told, 2)
    assert (state_of(world).base > base) is (lost > MOST_UNTOLD)
    assert play(world, told, 4) == 1.0


def test_a_prompt_that_is_told_faster_than_it_is_read(clockwork: Pair) -> None:
    """Several windows of it are there before the first row is read: none is forgotten unread."""
    prompt, window = chain(3, 6 * 32 + 5), 32
    world = HeadWorld(clockwork, clockwork.make_speculator(window=window))
    told = world.open(prompt=prompt)
    world.step()
    rows = told.features(0, len(prompt) - 1)
    for start in range(0, len(rows), 50):
        world.inbox.rows.append((RowsKey(told.key, start), rows[start : start + 50]))
    world.settle()
    told.num_told = len(rows)
    assert state_of(world).base == 0
    assert state_of(world).path.num_final == len(rows)
    assert world.core.stats().cached_blocks == len(rows) // BLOCK
    assert world.core.stats().dropped_features == 0
    assert play(world, told, 3) == 1.0


# Prefixes


def test_a_prefix_that_was_told_is_found_again(random_pair: Pair) -> None:
    """Of the second sequence only the rest has to be told."""
    world = HeadWorld(random_pair)
    prompt = [(7 * i + 3) % 512 for i in range(5 * BLOCK + 6)]
    begin(world, 1, prompt=prompt)
    world.close(1)
    told = world.open(2, prompt=prompt)
    world.settle()
    known = world.speculator.features_from(world.sequence(2))
    assert known == 5 * BLOCK
    world.tell(told, known)
    world.settle()
    alone = HeadWorld(random_pair)
    begin(alone, 2, prompt=prompt)
    assert {key: tokens for key, tokens in world.pushed.items() if key[0] == 2} == alone.pushed


def test_the_last_row_of_a_block_depends_on_the_token_after_it(random_pair: Pair) -> None:
    """And the first one on the token before it: where these differ, a block is not shared."""
    world = HeadWorld(random_pair)
    prompt = [(7 * i + 3) % 512 for i in range(3 * BLOCK + 6)]
    begin(world, 1, prompt=prompt)
    world.close(1)
    after = [*prompt[: 2 * BLOCK], 500, *prompt[2 * BLOCK + 1 :]]
    before = [501, *prompt[1:]]
    for key, (changed, known) in enumerate([(after, BLOCK), (before, 0)], 2):
        told = world.open(key, prompt=changed)
        world.settle()
        assert world.speculator.features_from(world.sequence(key)) == known
        world.tell(told, known)
        world.settle()
        alone = HeadWorld(random_pair)
        begin(alone, key, prompt=changed)
        own = {at: tokens for at, tokens in world.pushed.items() if at[0] == key}
        assert own == alone.pushed


def test_what_is_cached_for_a_link_outlives_any_number_of_texts_of_another(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are opened under every first token: they take no place where roots are remembered."""
    monkeypatch.setattr("ssd_engine.kvcache.scopes.MOST_SCOPES", 4)
    world = HeadWorld(random_pair)
    world.core.handle(TargetLinkUp(2, DEPTH))
    prompt = [(7 * i + 3) % 512 for i in range(5 * BLOCK + 6)]
    begin(world, 1, prompt=prompt)
    world.close(1)
    for first in range(10):
        told = Told(random_pair, 9, [first, 5, 6], SamplingParams(seed=1))
        world.core.handle(TargetFrames(2, [opening(told), Close(told.key, 0)]))
        world.step()
    world.open(2, prompt=prompt)
    world.step()
    assert world.speculator.features_from(world.sequence(2)) == 5 * BLOCK


def test_rows_of_its_own_never_enter_the_prefix_cache(clockwork: Pair) -> None:
    world = HeadWorld(clockwork)
    told = begin(world)
    cached = world.core.stats().cached_blocks
    while len(told.tokens) - 1 - told.num_told < 20:
        world.play(told, tells=False)
    assert world.core.stats().cached_blocks == cached
    world.tell(told)
    world.play(told)
    assert world.core.stats().cached_blocks > cached


# Room


def test_a_text_that_outgrows_the_head_begins_again(clockwork: Pair) -> None:
    world = HeadWorld(clockwork, clockwork.make_speculator(max_context=64))
    told = begin(world)
    assert play(world, told, 20) == 1.0
    assert len(told.tokens) > 100
    assert state_of(world).base > 0


def test_a_prompt_that_is_longer_than_the_heads_context(clockwork: Pair) -> None:
    """It is told of the end alone, as far as the head can read."""
    world = HeadWorld(clockwork, clockwork.make_speculator(max_context=64))
    told = world.open(prompt=chain(3, 150))
    world.settle()
    known = world.speculator.features_from(world.sequence())
    assert known == 149 - 32
    world.tell(told, known)
    world.settle()
    assert play(world, told, 4) == 1.0


# Strange rows


def shuffled(rows: torch.Tensor) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not a number": lambda rows: torch.full_like(rows, float("nan")),
    "infinite": lambda rows: torch.full_like(rows, float("-inf")),
    "huge": lambda rows: torch.full_like(rows, 3e38),
    "as large as is read": lambda rows: torch.full_like(rows, -1e8),
    "zero": torch.zeros_like,
    "one is not a number": lambda rows: torch.cat((rows[:-1], rows[-1:] * float("nan"))),
    "of other positions": shuffled,
    "noise": lambda rows: torch.randn_like(rows) * 100,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_rows_harm_nobody_else(random_pair: Pair, kind: str) -> None:
    """Neither those who share forwards, nor who takes over their blocks."""
    strange, alone = HeadWorld(random_pair), HeadWorld(random_pair)
    victim, told = begin(strange, 1), begin(alone, 1)
    other = strange.open(2, prompt=[(3 * i) % 512 for i in range(40)])
    strange.step()
    for _ in range(3):
        rows = STRANGE[kind](other.features(0, len(other.tokens) - 1))
        strange.speculator.take_features(strange.sequence(2), 0, rows)
        if strange.sequence(2).branches:
            outcome = sorted(strange.sequence(2).branches)[0]
            strange.decide(other, *outcome)
            strange.launch(other, outcome)
        strange.play(victim)
        alone.play(told)
    strange.close(2)
    strange.step()
    late = begin(strange, 3)
    begin(alone, 3)
    assert late.tokens
    own = {at: tokens for at, tokens in strange.pushed.items() if at[0] != 2}
    assert own == alone.pushed


@pytest.mark.parametrize("start", [-1, 10**9, 2**63, 45])
def test_rows_of_positions_that_there_are_not(clockwork: Pair, start: int) -> None:
    world = HeadWorld(clockwork)
    told = begin(world)
    width = world.needs.width
    world.speculator.take_features(world.sequence(), start, torch.ones(5, width))
    world.speculator.take_features(world.sequence(), 3, torch.ones(0, width))
    assert play(world, told, 6) == 1.0
