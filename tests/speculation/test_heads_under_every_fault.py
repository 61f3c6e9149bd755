"""Exact with a head as the draft, whatever befalls what it is told.

Every token is plain decoding's. Scenarios are drawn as in ``test_exact_under_every_fault.py``.
Features are lost, late, permuted, corrupted, and said to be those of other sequences or positions;
drafts crash and links break in the middle of it; prefixes are cached on both sides, requests are
resumed, prompts come in pieces. Counters show that all of that did happen. Most scenarios have a
head that foresees all, and reads no token but the last; fewer have the one that ships, or dense
random weights, where a row depends on all rows before it.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.clockwork import VOCAB
from tests.speculation.scenarios import (
    Dice,
    Pair,
    Scenario,
    clockwork_pair,
    dense_pair_with_head,
    draw_scenario,
    run_scenarios,
    stories_with_head,
)
from tests.suite.scale import FULL, full_only

pytestmark = pytest.mark.usefixtures("as_in_the_services")

# Enough for the counters: of pairs whose head reads the last token alone, or all that it is told.
SCHEDULES, READING_SCHEDULES = (1000, 250) if FULL else (16, 8)
MOST_REQUESTS = 2
AT_LEAST = 50 if FULL else 2  # of everything that can happen
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
    *("prefix hits", "set_aside", "rows", "missed", "requests"),
)
DENSE = {"llama, dense": ("llama3-untied", "llama"), "qwen3, dense": ("qwen3", "qwen3-all-norms")}


@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("drafted", [full_only(VOCAB), 40], ids=["all tokens", "some tokens"])
def test_every_token_is_plain_decodings(drafted: int, tmp_path: Path) -> None:
    pair = clockwork_pair(drafted, tmp_path)
    met = run_scenarios(pair, (draw(pair, number) for number in range(SCHEDULES)))
    stats = met.stats
    happened = {
        "hits": stats.hits,
        "late": stats.late,
        "token misses": stats.token_misses,
        "just-in-time rounds": stats.just_in_time_rounds,
        "sync rounds": stats.sync_rounds,
        "rejections": stats.rejected_rounds,
        "full acceptances": stats.full_rounds,
        **{name: met.befallen[name] for name in BEFALLEN},
    }
    print(f"{stats.rounds} rounds, {happened}")
    assert min(happened.values()) >= AT_LEAST, happened


@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("name", ["stories", *map(full_only, DENSE)])
def test_heads_that_read_all_that_they_are_told(name: str, tmp_path: Path) -> None:
    pair = dense_pair_with_head(*DENSE[name], tmp_path) if name in DENSE else stories_with_head()
    met = run_scenarios(pair, (draw(pair, number) for number in range(READING_SCHEDULES)))
    stats, befallen = met.stats, met.befallen
    happened = {
        "accepted": stats.accepted_tokens,
        "hits": stats.hits,
        "token misses": stats.token_misses,
        "rejections": stats.rejected_rounds,
        "features spoilt": sum(befallen[each] for each in BEFALLEN[:5]),
        "drafts and links lost": befallen["crashed"] + befallen["link broken"],
        **{each: befallen[each] for each in ("resumed", "in pieces", "prefix hits")},
        **{each: befallen[each] for each in ("rows", "requests")},
    }
    print(f"{stats.rounds} rounds, {happened}")
    assert all(happened.values()), happened


def draw(pair: Pair, number: int) -> Scenario:
    scenario, dice = draw_scenario(pair, number), Dice(pair.name, number)
    befalls = {name: dice.choice([0.0, 0.1, 0.3]) for name in FAULTS}
    faults = replace(scenario.how["faults"], **(befalls if number % 4 else {}))
    drafts = (True,) if True not in scenario.drafts else scenario.drafts
    told = {"faults": faults, "prefill_chunk": dice.choice([16, 128])}
    requests, how = scenario.requests[:MOST_REQUESTS], {**scenario.how, **told}
    return replace(scenario, drafts=drafts, requests=requests, how=how)
