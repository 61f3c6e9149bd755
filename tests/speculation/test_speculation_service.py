"""Speculation as a user meets it: equal texts in every mode, and statistics that add up."""

from typing import Any, ClassVar

import pytest

from ssd.v1 import target_pb2 as pb
from tests.processes import Output
from tests.speculation.generations import (
    OFF,
    SSD,
    SYNC,
    Pair,
    generate,
    looked_up,
    request,
    violation,
    wait_until_up,
)
from tests.suite.scale import FULL, share
from tests.waiting import wait_until


def in_every_mode(pair: Pair, *messages: pb.GenerateRequest) -> list[list[Output]]:
    """Side by side; held to add up."""
    rows = pair.in_every_mode(messages)
    for outputs in rows:
        assert [output.finish.speculation.mode for output in outputs] == [OFF, SYNC, SSD]
        for output in outputs:
            assert_adds_up(output)
        off, sync, _ = (output.finish.speculation for output in outputs)
        assert off.plain_rounds == off.rounds
        assert sync.hits + sync.late + sync.cache_rounds + sync.wait_micros == 0
        assert sync.sync_rounds > 0
    return rows


def assert_adds_up(output: Output) -> None:
    stats = output.finish.speculation
    rounds = (
        stats.cache_rounds
        + stats.just_in_time_rounds
        + stats.ngram_rounds
        + stats.sync_rounds
        + stats.grammar_rounds
        + stats.plain_rounds
    )
    assert rounds == stats.rounds
    # The first token is the prefill's, or that of a resumed request's first step. A round gives
    # what was right and one token more, unless the text ends among the former.
    given = 1 + stats.rounds + stats.accepted_tokens
    assert len(output.tokens) in (given, given - 1)
    assert stats.full_rounds + stats.rejected_rounds == stats.rounds - stats.plain_rounds
    assert stats.cache_tokens <= stats.accepted_tokens <= stats.drafted_tokens
    assert stats.cache_rounds <= stats.hits + stats.late
    assert looked_up(stats) <= stats.rounds
    assert stats.verification == pb.VERIFICATION_MODE_COUPLED


class TestEveryModeGivesOneText:
    SAMPLING: ClassVar[list[dict[str, Any]]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"temperature": 0.7, "frequency_penalty": 0.6, "logit_bias": {7: 2.0, 300: -100.0}},
    ]

    def test_with_sampling_options(self, pair: Pair) -> None:
        for seed in range(share(20)):
            length = 60 if FULL else 24
            in_every_mode(pair, *(request(seed, length, **each) for each in self.SAMPLING))

    def test_with_min_tokens(self, pair: Pair) -> None:
        """The likeliest tokens are banned for a while, which ends within a speculation."""
        for seed in (3, 4) if FULL else (3,):
            whole = generate(pair.target, request(seed, 40, speculation={"mode": OFF}))
            message = request(seed, 60)
            message.stop.token_ids[:] = sorted(set(whole.tokens))
            message.stop.min_tokens = 21
            outputs = in_every_mode(pair, message)[0]
            assert not set(outputs[0].tokens[:21]) & set(whole.tokens)
            assert sum(output.finish.speculation.accepted_tokens for output in outputs) > 0

    def test_of_a_chat_to_its_own_end(self, pair: Pair) -> None:
        asked = pb.ChatMessage(role="user", content="Tell me a story about a shy lamb.")
        message = pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[asked]),
            sampling=pb.SamplingOptions(seed=4, temperature=0.6),
            stop=pb.StopOptions(max_tokens=300),
        )
        outputs = in_every_mode(pair, message)[0]
        assert outputs[0].finish.WhichOneof("stopped_by") == "stop_token_id"


class TestStatistics:
    def test_metrics_are_their_sum(self, pair: Pair) -> None:
        before = pair.target.metrics()
        outputs = [generate(pair.target, request(seed, 30)) for seed in range(3)]
        after = pair.target.metrics()

        def rise(name: str) -> float:
            return after[name] - before[name]

        stats = [output.finish.speculation for output in outputs]
        for source in ("cache", "just_in_time", "ngram", "sync", "grammar", "plain"):
            expected = sum(getattr(each, f"{source}_rounds") for each in stats)
            assert rise(f'ssd_rounds_total{{source="{source}"}}') == expected
        assert rise("ssd_spec_decode_num_accepted_tokens_total") == sum(
            each.accepted_tokens for each in stats
        )

    def test_what_a_draft_drew_from_reaches_the_target(self, pair: Pair) -> None:
        """By the tensor plane of their link."""
        wait_until_up(pair.target, pair.draft.address)
        rejection = {"mode": SSD, "verification": pb.VERIFICATION_MODE_REJECTION}

        def rejects() -> bool:
            output = generate(pair.target, request(1, 40, speculation=rejection))
            stats = output.finish.speculation
            return stats.rejection_rounds > 0 and stats.accepted_tokens > 0

        wait_until(rejects)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"depth": 6}, "speculation.depth"),
        ({"depth": 2**32 - 1}, "speculation.depth"),
        ({"down_weight": 1.5}, "speculation.down_weight"),
        ({"down_weight": -0.1}, "speculation.down_weight"),
        ({"down_weight": float("nan")}, "speculation.down_weight"),
        ({"endpoints": ["nonsense"]}, "speculation.endpoints"),
    ],
)
def test_bad_options_name_their_field(pair: Pair, options: dict[str, Any], field: str) -> None:
    assert violation(pair.target, request(1, 4, speculation=options)).field == field
