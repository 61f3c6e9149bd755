"""Exact with a head as the draft, whatever befalls what it is told.

Every token is plain decoding's. Scenarios are drawn as in ``test_exact_under_every_fault.py``.
Features are lost, late, permuted, corrupted, and said to be those of other sequences or positions;
drafts crash and links break in the middle of it; prefixes are cached on both sides, requests are
resumed, prompts come in pieces. Counters show that all of that did happen. Most scenarios have a
head that foresees all, and reads no token but the last; fewer have the one that ships, or dense
random weights, where a row depends on all rows before it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.clockwork import VOCAB
from tests.speculation.scenarios import (
    Dice,
    Met,
    Pair,
    Scenario,
    check,
    clockwork_pair,
    dense_pair_with_head,
    draw_scenario,
    stories_with_head,
)
from tests.speculation.test_exact_under_every_fault import simplest
from tests.suite.scale import FULL, full_only, share

SCHEDULES = share(2000, least=200)  # enough for its counters
MOST_REQUESTS = 2
AT_LEAST = 50 if FULL else 10  # of everything that can happen
EVERY = 20  # of the schedules is drawn for pairs whose heads read all that they are told
FAULTS = (
    "lose_features",
    "delay_features",
    "permute_features",
    "corrupt_features",
    "misplace_features",
)
BEFALLEN = (
    *("lost", "delayed", "permuted", "corrupted", "misplaced"),
    *("crashed", "stopped", "link broken", "resumed", "in pieces"),
    *("prefix hits", "prefix hits at the head", "prefix hits on both sides"),
    *("rows", "missed", "requests"),
)
DENSE = {"llama, dense": ("llama3-untied", "llama"), "qwen3, dense": ("qwen3", "qwen3-all-norms")}


@pytest.fixture(autouse=True)
def as_in_the_services() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("drafted", [full_only(VOCAB), 40], ids=["all tokens", "some tokens"])
def test_every_token_is_plain_decodings(drafted: int, tmp_path: Path) -> None:
    met = run_schedules(clockwork_pair(drafted, tmp_path), SCHEDULES // 2)
    stats = met.stats
    happened = {
        "hits": stats.hits,
        "late": stats.late,
        "token misses": stats.token_misses,
        "just-in-time rounds": stats.just_in_time_rounds,
        "sync rounds": stats.sync_rounds,
        "rejections": stats.rejected_rounds,
        "full acceptances": stats.full_rounds,
        "set aside": met.set_aside,
        **{name: met.befallen[name] for name in BEFALLEN},
    }
    print(f"{met.sequences} sequences, {met.tokens} tokens, {stats.rounds} rounds, {happened}")
    assert min(happened.values()) >= AT_LEAST, happened


@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("name", ["stories", "llama, dense", full_only("qwen3, dense")])
def test_heads_that_read_all_that_they_are_told(name: str, tmp_path: Path) -> None:
    pair = dense_pair_with_head(*DENSE[name], tmp_path) if name in DENSE else stories_with_head()
    met = run_schedules(pair, SCHEDULES // EVERY)
    stats, befallen = met.stats, met.befallen
    happened = {
        "accepted": stats.accepted_tokens,
        "hits": stats.hits,
        "token misses": stats.token_misses,
        "rejections": stats.rejected_rounds,
        "features spoilt": sum(befallen[each] for each in BEFALLEN[:5]),
        "drafts and links lost": befallen["crashed"] + befallen["link broken"],
        **{each: befallen[each] for each in ("resumed", "in pieces", "rows", "requests")},
        **{each: befallen[each] for each in BEFALLEN if each.startswith("prefix hits")},
    }
    print(f"{met.sequences} sequences, {met.tokens} tokens, {stats.rounds} rounds, {happened}")
    assert all(happened.values()), happened


def run_schedules(pair: Pair, count: int) -> Met:
    """No token differs, not even where two are almost equally likely."""
    met = Met()
    for number in range(count):
        scenario = draw(pair, number)
        try:
            check(pair, scenario, met)
        except Exception as error:
            told = f"{pair.name}, scenario {number}: {error}"
            raise AssertionError(f"{told}\nin short: {simplest(pair, scenario)}") from error
    assert not met.excused
    return met


def draw(pair: Pair, number: int) -> Scenario:
    scenario, dice = draw_scenario(pair.name, number, pair.vocab_size), Dice(pair.name, number)
    befalls = {name: dice.choice([0.0, 0.1, 0.3]) for name in FAULTS}
    faults = replace(scenario.faults, **(befalls if number % 4 else {}))
    drafts = (True,) if True not in scenario.drafts else scenario.drafts
    requests = scenario.requests[:MOST_REQUESTS]
    chunk = dice.choice([16, 128])
    return replace(scenario, faults=faults, drafts=drafts, requests=requests, prefill_chunk=chunk)
