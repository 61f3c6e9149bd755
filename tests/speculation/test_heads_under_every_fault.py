"""Exact with a head as the draft, whatever befalls what it is told.

Every token is plain decoding's. Scenarios are drawn as in ``test_exact_under_every_fault.py``.
Features are lost, late, permuted, corrupted, and said to be those of other sequences or positions;
drafts crash and links break in the middle of it; prefixes are cached on both sides, requests are
resumed, prompts come in pieces. Counters show that all of that did happen.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.clockwork import VOCAB
from tests.scale import FULL, share
from tests.speculation.scenarios import (
    Dice,
    Met,
    Pair,
    Scenario,
    check,
    clockwork_pair,
    draw_scenario,
)
from tests.speculation.test_exact_under_every_fault import simplest

SCHEDULES = share(2000)
MOST_REQUESTS = 2
AT_LEAST = 50 if FULL else 10  # of everything that can happen
FAULTS = (
    "lose_features",
    "delay_features",
    "permute_features",
    "corrupt_features",
    "misplace_features",
)
BEFALLEN = (
    *("lost", "delayed", "permuted", "corrupted", "misplaced"),
    *("crashed", "stopped", "link broken", "resumed", "in pieces", "prefix hits"),
    *("rows", "missed", "requests"),
)


@pytest.fixture(scope="module", params=[VOCAB, 40], ids=["all tokens", "some tokens"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with torch.backends.mkldnn.flags(enabled=False):  # as in the services
        yield clockwork_pair(request.param, tmp_path_factory.mktemp("clockwork"))


def draw(pair: Pair, number: int) -> Scenario:
    scenario, dice = draw_scenario(pair.name, number, pair.vocab_size), Dice(pair.name, number)
    befalls = {name: dice.choice([0.0, 0.1, 0.3]) for name in FAULTS}
    faults = replace(scenario.faults, **(befalls if number % 4 else {}))
    drafts = (True,) if True not in scenario.drafts else scenario.drafts
    requests = scenario.requests[:MOST_REQUESTS]
    chunk = dice.choice([16, 128])
    return replace(scenario, faults=faults, drafts=drafts, requests=requests, prefill_chunk=chunk)


@pytest.mark.timeout(3600)
def test_every_token_is_plain_decodings(pair: Pair) -> None:
    met = Met()
    for number in range(SCHEDULES // 2):
        scenario = draw(pair, number)
        try:
            check(pair, scenario, met)
        except Exception as error:
            told = f"{pair.name}, scenario {number}: {error}"
            raise AssertionError(f"{told}\nin short: {simplest(pair, scenario)}") from error
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
    assert not met.excused
    assert min(happened.values()) >= AT_LEAST, happened
