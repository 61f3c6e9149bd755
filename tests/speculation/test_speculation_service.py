"""Speculation as a user meets it: equal texts in every mode, and statistics that add up."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import speculation_pb2
from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from tests.processes import Output, TargetProcess, draft, target
from tests.speculation.generations import (
    METRICS,
    OFF,
    SSD,
    SYNC,
    Generations,
    Pair,
    draft_info,
    generate,
    looked_up,
    request,
    wait_until_up,
    with_speculation,
)
from tests.suite.scale import FULL
from tests.waiting import wait_until

MODES = (OFF, SYNC, SSD)
NOBODY = "127.0.0.1:1"
REPEATING = "The cat saw the dog. The dog saw the cat. " * 6


def in_every_mode(pair: Pair, *messages: pb.GenerateRequest) -> list[list[Output]]:
    """Side by side; held to be equal, and to add up."""
    wait_until_up(pair.target, pair.draft.address)
    each = [with_speculation(message, mode=mode) for message in messages for mode in MODES]
    with Generations(pair.target, each) as running:
        pass
    rows = [running.outputs[i : i + 3] for i in range(0, len(each), 3)]
    for outputs in rows:
        assert_equal(outputs)
        for mode, output in zip(MODES, outputs, strict=True):
            assert output.finish.speculation.mode == mode
            assert_adds_up(output)
    return rows


def assert_equal(outputs: Sequence[Output]) -> None:
    first = outputs[0]
    for other in outputs[1:]:
        assert (other.text, other.tokens) == (first.text, first.tokens)
        assert other.finish.reason == first.finish.reason
        assert other.finish.WhichOneof("stopped_by") == first.finish.WhichOneof("stopped_by")
        assert other.finish.stop_string == first.finish.stop_string
        assert other.finish.stop_token_id == first.finish.stop_token_id
        assert other.finish.usage.completion_tokens == first.finish.usage.completion_tokens
        assert other.seed == other.finish.seed == first.seed


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
        for seed in range(20 if FULL else 2):
            length = 60 if FULL else 24
            in_every_mode(pair, *(request(seed, length, **each) for each in self.SAMPLING))

    def test_with_stop_strings_and_tokens(self, pair: Pair) -> None:
        """At any place in a speculation: the text ends there, to the letter."""
        length, places = (80, 80) if FULL else (40, 10)
        whole = generate(pair.target, request(3, length, speculation={"mode": OFF}))
        messages = [request(3, length) for _ in range(places)]
        for place, message in enumerate(messages):
            if place % 2:
                message.stop.token_ids[:] = [whole.tokens[5 + place // 2]]
            else:
                begin = 8 + 3 * (place // 2)
                message.stop.strings[:] = ["never there", whole.text[begin : begin + 9]]
        for first in range(0, len(messages), 10):
            for outputs in in_every_mode(pair, *messages[first : first + 10]):
                assert outputs[0].finish.reason == pb.FINISH_REASON_STOP

    def test_with_min_tokens(self, pair: Pair) -> None:
        """The likeliest tokens are banned for a while, which ends within a speculation."""
        for seed in (3, 4):
            whole = generate(pair.target, request(seed, 40, speculation={"mode": OFF}))
            message = request(seed, 60)
            message.stop.token_ids[:] = sorted(set(whole.tokens))
            message.stop.min_tokens = 21
            outputs = in_every_mode(pair, message)[0]
            assert not set(outputs[0].tokens[:21]) & set(whole.tokens)
            assert sum(output.finish.speculation.accepted_tokens for output in outputs) > 0

    def test_with_every_length(self, pair: Pair) -> None:
        lengths = range(1, 11)
        rows = in_every_mode(pair, *(request(5, length) for length in lengths))
        assert [len(outputs[0].tokens) for outputs in rows] == list(lengths)
        assert all(output.finish.speculation.rounds == 0 for output in rows[0])

    def test_with_logprobs(self, pair: Pair) -> None:
        message = request(7, 40, temperature=1.0)
        message.logprobs.top_n, message.logprobs.prompt = 3, True
        outputs = in_every_mode(pair, message)[0]
        assert len(outputs[0].logprobs) == len(outputs[0].tokens)
        assert len(outputs[0].prompt.logprobs) == outputs[0].finish.usage.prompt_tokens
        assert all(output.prompt == outputs[0].prompt for output in outputs)
        assert all(output.logprobs == outputs[0].logprobs for output in outputs)  # every bit

    def test_of_a_chat_to_its_own_end(self, pair: Pair) -> None:
        asked = pb.ChatMessage(role="user", content="Tell me a story about a shy lamb.")
        message = pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[asked]),
            sampling=pb.SamplingOptions(seed=4, temperature=0.6),
            stop=pb.StopOptions(max_tokens=300),
        )
        outputs = in_every_mode(pair, message)[0]
        assert outputs[0].finish.WhichOneof("stopped_by") == "stop_token_id"

    def test_of_a_request_that_is_resumed(self, pair: Pair) -> None:
        whole = generate(pair.target, request(9, speculation={"mode": OFF}))
        cuts = (1, 13, 39)
        messages = [request(9) for _ in cuts]
        for cut, message in zip(cuts, messages, strict=True):
            tokens = (token.to_bytes(4, "little") for token in whole.tokens[:cut])
            message.generated_token_ids = b"".join(tokens)
        for cut, outputs in zip(cuts, in_every_mode(pair, *messages), strict=True):
            assert outputs[0].tokens == whole.tokens[cut:]

    @pytest.mark.parametrize("mode", [SYNC, SSD])
    def test_at_every_depth(self, pair: Pair, mode: int) -> None:
        """One by one: a forward may then be held back for a branch."""
        drafted = 0
        for depth in range(1, 6):
            message = request(11, 30, speculation={"mode": mode, "depth": depth})
            output = generate(pair.target, message)
            assert [(output.text, output.tokens)] == pair.plain.of([message])
            stats = output.finish.speculation
            assert stats.drafted_tokens <= depth * (stats.full_rounds + stats.rejected_rounds)
            drafted += stats.drafted_tokens
        assert drafted > 0


class TestStatistics:
    def test_they_tell_how_a_request_was_sped_up(self, pair: Pair) -> None:
        rows = in_every_mode(pair, *(request(seed) for seed in range(6)))
        off, sync, _ = ([row[i].finish.speculation for row in rows] for i in range(3))
        assert all(each.plain_rounds == each.rounds == 39 for each in off)
        assert sum(each.accepted_tokens for each in sync) > 50
        for each in sync:
            assert each.sync_rounds > 0
            assert each.hits + each.late + each.cache_rounds + each.wait_micros == 0
        alone = pair.generate_from_cache([request(seed) for seed in range(6)])
        ssd = [output.finish.speculation for output in alone]
        assert sum(each.rejected_rounds for each in ssd) > 0
        assert sum(each.full_rounds for each in ssd) > 0

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

    def test_the_first_token_after_the_prefill_is_speculated(self, pair: Pair) -> None:
        """Both sides prefill at the same time: round 1 can already be a hit.

        Of three tokens the first is the prefill's, and the last is never speculated.
        """

        def is_hit(seed: int) -> bool:
            # No two prompts begin alike: one that the target has in its cache takes it no time.
            message = request(seed, 3, text=f"{seed} little lambs. " + "Once upon a time " * 30)
            output = generate(pair.target, message)
            assert [(output.text, output.tokens)] == pair.plain.of([message])
            stats = output.finish.speculation
            return stats.cache_rounds == stats.rounds == stats.accepted_tokens == 1

        seeds = iter(range(1000))
        wait_until(lambda: is_hit(next(seeds)))


class TestOptionsOfNewerClients:
    @pytest.mark.parametrize("options", [{"mode": 77}, {"mode": SSD, "verification": 77}])
    def test_what_is_not_known_here_is_the_default(
        self, pair: Pair, options: dict[str, Any]
    ) -> None:
        message = request(4, 20, speculation=options)
        output = generate(pair.target, message)
        assert [(output.text, output.tokens)] == pair.plain.of([message])
        served = output.finish.speculation
        assert (served.mode, served.verification) == (SSD, pb.VERIFICATION_MODE_COUPLED)


class TestBadOptions:
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
    def test_they_name_their_field(self, pair: Pair, options: dict[str, Any], field: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            generate(pair.target, request(1, 4, speculation=options))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        detail = error_details_pb2.BadRequest()
        assert rpc_status.from_call(caught.value).details[0].Unpack(detail)
        assert [violation.field for violation in detail.field_violations] == [field]


class TestWhatServersSay:
    def test_the_draft(self, pair: Pair) -> None:
        info = draft_info(pair.draft.process)
        assert (info.name, info.speculator) == (
            "stories-draft",
            speculation_pb2.SPECULATOR_KIND_MODEL,
        )
        theirs = pair.target.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        assert info.tokenizer_fingerprint == theirs.tokenizer_fingerprint
        assert info.vocab_size == theirs.vocab_size
        assert info.max_sequences == 16
        assert info.links == 1

    def test_the_target(self, pair: Pair) -> None:
        info = pair.target.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        assert list(info.speculation_modes) == [SSD, SYNC, OFF]
        assert info.max_speculation_depth == 5
        own = info.speculation_endpoints[0]
        assert (own.address, own.state) == (pair.draft.address, "up")
        assert (own.draft_name, own.reason) == ("stories-draft", "")


VARIANTS = [
    ("--wait", "0", "--backup", "none"),
    *(
        (
            ("--backup", "ngram"),
            ("--backup", "jit", "--wait", "50"),
            ("--depth", "1"),
            ("--no-adapt-depth", "--depth", "12"),
        )
        if FULL
        else ()
    ),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=" ".join)
def variant(
    request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TargetProcess, tuple[str, ...]]]:
    flags = (*METRICS, "--draft", pair.draft.address, "--draft", NOBODY, "--no-auto-off")
    flags += ("--allow-draft", "127.0.0.1:*")
    with target(tmp_path_factory.mktemp("variant"), *flags, *request.param) as process:
        wait_until_up(process, pair.draft.address)
        yield process, request.param


class TestOtherServers:
    def test_the_text_is_that_of_any_other(
        self, pair: Pair, variant: tuple[TargetProcess, tuple[str, ...]]
    ) -> None:
        server, flags = variant
        messages = [request(seed, 40, text=REPEATING) for seed in range(6 if FULL else 3)]
        outputs: list[Output] = []

        def from_cache() -> bool:
            outputs[:] = [generate(server, message) for message in messages]
            return any(output.finish.speculation.cache_tokens for output in outputs)

        wait_until(from_cache, "tokens of the cache")
        assert [(output.text, output.tokens) for output in outputs] == pair.plain.of(messages)
        for output in outputs:
            assert_adds_up(output)
        stats = [output.finish.speculation for output in outputs]
        if "--wait" in flags and "0" in flags:
            assert sum(each.wait_micros + each.just_in_time_rounds for each in stats) == 0
        if "none" in flags:
            assert sum(each.ngram_rounds for each in stats) == 0
        if "ngram" in flags:
            assert sum(each.ngram_rounds for each in stats) > 0
            assert sum(each.wait_micros for each in stats) == 0
        if "jit" in flags:
            assert sum(each.just_in_time_rounds for each in stats) > 0
            assert sum(each.ngram_rounds for each in stats) == 0
        if "1" in flags:
            assert all(each.drafted_tokens <= each.rounds for each in stats)
        assert not any("refused" in each.fallbacks for each in stats)
        info = server.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        absent = info.speculation_endpoints[1]
        assert absent.address == NOBODY
        assert absent.state in ("waiting", "connecting")
        assert "UNAVAILABLE" in absent.reason

    def test_an_endpoint_that_looks_ngrams_up(
        self, pair: Pair, variant: tuple[TargetProcess, tuple[str, ...]], tmp_path: Path
    ) -> None:
        """It has nothing to say where nothing repeats: this target does not wait for it."""
        server = variant[0]
        with draft(tmp_path, model=None) as ngram:
            options = {"mode": SSD, "endpoints": [ngram.address]}
            messages = [request(seed, text=REPEATING, speculation=options) for seed in (0, 3, 1)]
            generate(server, messages[0])
            wait_until_up(server, ngram.address)
            plain = pair.plain.of(messages)

            def from_cache() -> bool:
                with Generations(server, messages) as running:
                    pass
                assert running.texts() == plain
                return any(stats.cache_tokens for stats in running.stats())

            wait_until(from_cache, "tokens of the cache")
            assert draft_info(ngram).speculator == speculation_pb2.SPECULATOR_KIND_NGRAM


def test_a_draft_with_another_tokenizer_is_refused_and_harms_nothing(
    pair: Pair, tmp_path: Path
) -> None:
    """A real draft, with two tokens of its model swapped."""
    model = Path(shutil.copytree(resolve_model("stories-draft"), tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    one, other_one = list(ids)[-2:]
    ids[one], ids[other_one] = ids[other_one], ids[one]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    misfits = 'ssd_link_failures_total{reason="misfit"}'
    with draft(tmp_path / "draft", *METRICS, model=str(model)) as other:
        message = request(1, 30, speculation={"mode": SSD, "endpoints": [other.address]})
        before = pair.target.metrics().get(misfits, 0)
        told = len(pair.target.log())  # of others, who may have had the port before
        output = generate(pair.target, message)
        assert [(output.text, output.tokens)] == pair.plain.of([message])
        wait_until(lambda: pair.target.metrics().get(misfits, 0) > before)

        def lines() -> list[str]:
            log = pair.target.log()[told:].rpartition("\n")[0]
            return [line for line in log.splitlines() if other.address in line]

        assert len(wait_until(lines)) == 1
        assert "tokenizer_fingerprint: the target has" in lines()[0]
        assert other.metrics()['ssd_draft_handshake_failures_total{reason="tokenizer"}'] == 1
