"""Exact: every token, and every logprob, is plain decoding's, whatever drafts and links do.

Scenarios are drawn: modes, depths, fan-outs, wait rules and backups; all sampling options, stops,
resumed requests and prompts that share beginnings or were generated before; batches in which some
rows speculate and some do not; up to three drafts, of any speed, with or without a model; and, in
the middle of it, links that break, drafts that crash, freeze, lie and repeat themselves, and KV
blocks that run out, the target's and the drafts'. Equality
by never speculating is no result: counters show that all that can happen to a round did happen.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.sampling.sampler import SampleRow
from ssd_engine.speculation.speculation import Speculation
from ssd_target.engine import decode
from ssd_target.scheduling import verifier
from ssd_target.scheduling import work as work_module
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.work import Work
from tests.speculation.scenarios import (
    Met,
    Pair,
    Scenario,
    draw_scenario,
    random_pair,
    run_scenarios,
    stories,
)
from tests.suite.scale import FULL

SEQUENCES = 2000 if FULL else 60
AT_LEAST = 50 if FULL else 2  # of everything that can happen to a round
QUICK = range(4, 7)  # of the scenarios of random models: those in which most happens
SCENARIOS = {  # each of about four sequences
    "stories": 48,
    "llama, blurred": 100,
    "llama, smaller": 90,
    "qwen3, blurred": 100,
    "qwen3, smaller": 90,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    with torch.backends.mkldnn.flags(enabled=False):  # as in the services
        names = [name for name in SCENARIOS if FULL or name != "stories"]
        yield {name: make_pair(name, tmp_path_factory.mktemp("pair")) for name in names}


def make_pair(name: str, directory: Path) -> Pair:
    return stories() if name == "stories" else random_pair(*name.split(", "), directory)


def drawn(pair: Pair, numbers: range) -> Iterator[Scenario]:
    return (draw_scenario(pair, number) for number in numbers)


@pytest.mark.timeout(10_800)
def test_every_token_is_plain_decodings(pairs: dict[str, Pair]) -> None:
    met = Met()
    for name, pair in pairs.items():
        own = run_scenarios(pair, drawn(pair, range(SCENARIOS[name]) if FULL else QUICK))
        accepted, drafted = own.stats.accepted_tokens, own.stats.drafted_tokens
        print(f"{name}: {accepted} of {drafted} drafted tokens accepted")
        assert 0 < accepted < drafted
        met.add(own)
    stats = met.stats
    happened = {
        "hits": stats.hits,
        "late": stats.late,
        "late branches, taken as far as they went": met.befallen["truncated"],
        "length misses": stats.length_misses,
        "token misses": stats.token_misses,
        "just-in-time rounds": stats.just_in_time_rounds,
        "n-gram rounds": stats.ngram_rounds,
        "sync rounds": stats.sync_rounds,
        "rejections": stats.rejected_rounds,
        "full acceptances": stats.full_rounds,
        "set aside": met.befallen["set_aside"],
        "of these, kept in the host's memory": met.befallen["swapped_out"],
    }
    sequences, tokens = met.befallen["sequences"], met.befallen["tokens"]
    print(
        f"{met.befallen['sequences']} sequences, {tokens} tokens, {stats.rounds} rounds, {happened}"
    )
    print(f"rounds without an endpoint: {stats.fallbacks}")
    assert sequences >= SEQUENCES
    assert min(happened.values()) >= AT_LEAST, happened


# What must not go unnoticed: each of these breaks a rule of verification.


def what_is_drafted_is_emitted(patch: pytest.MonkeyPatch) -> None:
    """Unverified."""

    def verdict(
        works: Any, rows: Any, logits: Any, chosen: Any
    ) -> dict[int, tuple[range, list[int]]]:
        own = real(works, rows, logits, chosen)
        drafted = {i: works[i].speculation.tokens for i in chosen}
        return {i: (range(len(drafted[i])), [*drafted[i], own[i][1][-1]]) for i in chosen}

    real = verifier._coupled
    patch.setattr(verifier, "_coupled", verdict)


def one_more_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def path(speculation: Speculation, own: Any) -> range:
        return range(min(len(real(speculation, own)) + 1, len(speculation)))

    real = verifier.accepted_path
    patch.setattr(verifier, "accepted_path", path)


def penalties_forget_the_speculation(patch: pytest.MonkeyPatch) -> None:
    """Row i is drawn in its own place, but as if s1..si were s1."""

    def rows(work: Work) -> list[SampleRow]:
        first = work.speculation.tokens[:1]
        return [
            SampleRow(row.params, row.prompt, [*work.sequence.output, *(first * i)])
            for i, row in enumerate(real(work))
        ]

    real = verifier.sample_rows
    patch.setattr(verifier, "sample_rows", rows)


def noise_is_of_the_place_before(patch: pytest.MonkeyPatch) -> None:
    def rows(work: Work) -> list[SampleRow]:
        plain, *others = real(work)
        return [plain, *(SampleRow(r.params, r.prompt, [*r.output][:-1]) for r in others)]

    real = verifier.sample_rows
    patch.setattr(verifier, "sample_rows", rows)


def positions_are_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A speculation is written one place too far."""

    def extended(work: Work, speculation: Speculation, num_certain: int = 0) -> Work:
        if not speculation:
            return work
        chunk, sequence = work.chunk, work.sequence
        tokens = [*chunk.tokens, *speculation.tokens]
        moved = replace(chunk, tokens=tokens, start=chunk.start + 1, num_logits=len(tokens))
        written = work_module._work(sequence, moved, speculation)
        return replace(written, chunk=replace(moved, blocks=written.chunk.blocks))

    patch.setattr(decode, "extended", extended)


def rejected_tokens_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """What a request leaves in the prefix cache is read by the next one."""

    def offer(self: Scheduler, sequence: Any) -> None:
        sequence.num_written = sequence.num_committed
        real(self, sequence)

    real = Scheduler._offer_blocks
    patch.setattr(Scheduler, "_offer_blocks", offer)


def logprobs_are_of_the_place_before(patch: pytest.MonkeyPatch) -> None:
    def logprobs(logits: torch.Tensor, tokens: Any, top_n: Any) -> Any:
        return real(logits.roll(1, dims=0), tokens, top_n)

    real = verifier.logprobs
    patch.setattr(verifier, "logprobs", logprobs)


MUTANTS = [
    what_is_drafted_is_emitted,
    one_more_is_accepted,
    penalties_forget_the_speculation,
    noise_is_of_the_place_before,
    positions_are_off_by_one,
    rejected_tokens_stay_in_the_cache,
    logprobs_are_of_the_place_before,
]


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None],
    pairs: dict[str, Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the scenarios of every run."""
    pair = pairs["llama, blurred"]
    scenarios = [*drawn(pair, range(10))]
    mutant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        run_scenarios(pair, scenarios)
    print(f"{mutant.__name__}: {found.value}")
