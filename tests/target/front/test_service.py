"""The target as a user meets it: one real process on loopback, the shipped model."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from tests.process_tree import engine_held
from tests.processes import Output, TargetProcess, collect, target, wait_until_idle
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time"
CANCELLED = 'ssd_requests_total{outcome="cancelled"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    flags = ("--metrics-listen", "127.0.0.1:0", "--reflection", "--max-message-mib", "4")
    with target(tmp_path_factory.mktemp("target"), *flags) as process:
        yield process


def request(text: str = STORY, max_tokens: int = 40, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingOptions(**sampling),  # type: ignore[arg-type]
        stop=pb.StopOptions(max_tokens=max_tokens),
    )


def generate(server: TargetProcess, message: pb.GenerateRequest) -> Output:
    with server.channel() as channel:
        return collect(_call(channel, message))


def _call(channel: grpc.Channel, message: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
    return rpc.TargetServiceStub(channel).Generate(message, timeout=HANG_SECONDS)


def test_a_story_streams_and_finishes_with_usage_and_seed(server: TargetProcess) -> None:
    message = request(temperature=0.0, seed=3)
    out = generate(server, message)
    assert out.text.strip()
    assert out.finish.usage.completion_tokens == len(out.tokens) == 40
    assert out.finish.reason == pb.FINISH_REASON_LENGTH
    assert out.finish.seed == out.seed == 3


def test_chat_ends_by_itself_with_the_end_of_the_story(server: TargetProcess) -> None:
    message = pb.GenerateRequest(
        chat=pb.ChatPrompt(
            messages=[pb.ChatMessage(role="user", content="Tell me a story about a shy lamb.")]
        ),
        sampling=pb.SamplingOptions(temperature=0.0),
    )
    out = generate(server, message)
    assert out.finish.reason == pb.FINISH_REASON_STOP
    assert out.finish.WhichOneof("stopped_by") == "stop_token_id"
    assert len(out.text.split()) > 30


def test_no_seed_given_draws_one_and_returns_it(server: TargetProcess) -> None:
    first, second = generate(server, request()), generate(server, request())
    assert first.seed != second.seed
    again = generate(server, request(seed=first.seed))
    assert again.tokens == first.tokens


def test_the_text_ends_before_a_stop_string(server: TargetProcess) -> None:
    whole = generate(server, request(temperature=0.0, max_tokens=60))
    words = whole.text.split(" ")
    stop = f"{words[8]} {words[9][:2]}"
    message = request(temperature=0.0, max_tokens=60)
    message.stop.strings[:] = ["never there", stop]
    out = generate(server, message)
    assert out.text == whole.text[: whole.text.index(stop)]
    assert out.finish.reason == pb.FINISH_REASON_STOP
    assert out.finish.stop_string == stop
    assert out.tokens == whole.tokens[: len(out.tokens)]
    assert out.finish.usage.completion_tokens == len(out.tokens)


def test_a_stop_token_ends_the_output_and_its_text_is_not_streamed(server: TargetProcess) -> None:
    whole = generate(server, request(temperature=0.0))
    message = request(temperature=0.0)
    message.stop.token_ids[:] = [whole.tokens[10]]
    out = generate(server, message)
    first = whole.tokens.index(whole.tokens[10])
    assert out.tokens == whole.tokens[: first + 1]
    assert out.finish.stop_token_id == whole.tokens[10]
    assert whole.text.startswith(out.text)
    assert out.text != whole.text


def test_nothing_stops_before_min_tokens(server: TargetProcess) -> None:
    """Stop tokens are not drawn, log probabilities stay the model's; stop strings are text."""
    whole = generate(server, request(temperature=0.0))
    message = request(temperature=0.0)
    message.stop.token_ids[:] = [whole.tokens[10]]
    message.stop.strings[:] = [whole.text[4:9]]
    message.stop.min_tokens, message.logprobs.top_n = 25, 1
    out = generate(server, message)
    first = whole.tokens.index(whole.tokens[10])
    assert len(out.tokens) >= 25
    assert whole.tokens[10] not in out.tokens[:25]
    assert out.tokens[:first] == whole.tokens[:first]
    assert out.logprobs[first].top[0].token_id == whole.tokens[10]
    assert out.text.startswith(whole.text[:9])


def test_a_resumed_request_counts_what_was_generated_towards_min_tokens(
    server: TargetProcess,
) -> None:
    message = request(temperature=0.0)
    whole = generate(server, message)
    message.stop.token_ids[:] = list(set(whole.tokens[:20]))
    message.stop.min_tokens = 10
    once = generate(server, message)
    assert once.finish.reason == pb.FINISH_REASON_STOP
    for given in (4, 9, 10):
        again = pb.GenerateRequest()
        again.CopyFrom(message)
        again.generated_token_ids = pack_tokens(once.tokens[:given])
        assert generate(server, again).tokens == once.tokens[given:]


def test_ignore_eos_goes_on_after_the_end_of_the_story(server: TargetProcess) -> None:
    message = request(temperature=0.0, max_tokens=600)
    plain = generate(server, message)
    assert plain.finish.reason == pb.FINISH_REASON_STOP
    message.stop.ignore_eos = True
    message.stop.max_tokens = len(plain.tokens) + 10
    longer = generate(server, message)
    assert longer.finish.reason == pb.FINISH_REASON_LENGTH
    assert longer.tokens[: len(plain.tokens)] == plain.tokens


def test_prompt_logprobs_are_those_of_transformers(server: TargetProcess) -> None:
    """Whatever is cached of the prompt; and they change nothing about the text."""
    text = "Once upon a time there was a lamb who could sing. " * 30
    message = request(text=text, temperature=0.0, max_tokens=5)
    plain = generate(server, message)
    message.logprobs.prompt, message.logprobs.top_n = True, 3
    out = generate(server, message)
    assert out.tokens == plain.tokens
    assert out.finish.usage.cached_prompt_tokens == 0
    prompt = unpack_tokens(out.prompt.token_ids)
    assert len(prompt) == out.finish.usage.prompt_tokens > 256
    assert out.prompt.text.endswith(text)
    directory = resolve_model("stories-target")
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert out.prompt.logprobs[0] == pb.TokenLogprobs()
    for line, token, values in zip(expected, prompt[1:], out.prompt.logprobs[1:], strict=False):
        assert values.chosen == pytest.approx(line[token].item(), abs=1e-4)
        best = line.topk(3).values.tolist()
        assert [each.logprob for each in values.top] == pytest.approx(best, abs=1e-4)


def test_a_request_that_has_ended_has_no_prompt_logprobs(server: TargetProcess) -> None:
    message = request(max_tokens=2)
    message.generated_token_ids, message.logprobs.prompt = pack_tokens([9, 9]), True
    with pytest.raises(grpc.RpcError, match=r"logprobs\.prompt"):
        generate(server, message)


def test_logprobs_are_the_models_own_whatever_the_sampling(server: TargetProcess) -> None:
    greedy = request(temperature=0.0, max_tokens=20)
    greedy.logprobs.top_n = 5
    out = generate(server, greedy)
    assert len(out.logprobs) == len(out.tokens)
    for token, values in zip(out.tokens, out.logprobs, strict=True):
        assert values.top[0].token_id == token
        assert values.chosen == pytest.approx(values.top[0].logprob)
        assert [t.logprob for t in values.top] == sorted(
            (t.logprob for t in values.top), reverse=True
        )
    forced = request(temperature=2.0, max_tokens=20, top_k=1, presence_penalty=0.0)
    forced.logprobs.chosen = True
    same = generate(server, forced)
    assert same.tokens == out.tokens
    for a, b in zip(out.logprobs, same.logprobs, strict=True):
        assert a.chosen == b.chosen
        assert not b.top


def test_generated_tokens_are_counted_and_not_streamed_again(server: TargetProcess) -> None:
    message = request(seed=11, max_tokens=50, frequency_penalty=0.5, repetition_penalty=1.2)
    whole = generate(server, message)
    for cut in (1, 17, 49):
        message.generated_token_ids = b"".join(t.to_bytes(4, "little") for t in whole.tokens[:cut])
        rest = generate(server, message)
        assert rest.tokens == whole.tokens[cut:]
        assert rest.finish.usage.completion_tokens == 50
        assert whole.text.endswith(rest.text)


def test_a_request_that_had_ended_before_finishes_at_once(server: TargetProcess) -> None:
    message = request(seed=11, max_tokens=12)
    whole = generate(server, message)
    message.generated_token_ids = b"".join(t.to_bytes(4, "little") for t in whole.tokens)
    rest = generate(server, message)
    assert rest.tokens == []
    assert rest.finish.reason == whole.finish.reason
    assert rest.finish.usage.completion_tokens == 12


class TestPrompts:
    def test_messages_in_json_are_answered_as_those_in_fields(self, server: TargetProcess) -> None:
        text = "Tell me a story about a shy lamb."
        parts = [{"type": "text", "text": text}]
        messages = json.dumps([{"role": "user", "content": parts, "name": "Zoë"}]).encode()
        answers = []
        for chat in (
            pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)]),
            pb.ChatPrompt(messages_json=messages),
        ):
            message = request(temperature=0.0, max_tokens=10)
            message.chat.CopyFrom(chat)
            answers.append(generate(server, message))
        assert answers[0].tokens == answers[1].tokens

    def test_a_message_is_continued(self, server: TargetProcess) -> None:
        whole = request(temperature=0.0, max_tokens=20)
        whole.chat.messages.add(role="user", content="A lamb.")
        story = generate(server, whole).text
        message = request(temperature=0.0, max_tokens=10)
        message.chat.messages.add(role="user", content="A lamb.")
        message.chat.messages.add(role="assistant", content=story[: story.rindex(" ")])
        message.chat.continue_final_message = message.return_prompt = True
        with server.channel() as channel:
            _, event, *_ = _call(channel, message)
        assert event.prompt.text == f"<|bos|><|user|>A lamb.<|story|>{story[: story.rindex(' ')]}"

    def test_the_prompt_comes_back_as_it_was_read(self, server: TargetProcess) -> None:
        message = request(max_tokens=2)
        message.return_prompt = True
        message.generated_token_ids = pack_tokens([300])  # also to those who resume, if they ask
        with server.channel() as channel:
            started, event, *rest = _call(channel, message)
        assert started.started.prompt_tokens == 5
        assert event.prompt.text == f"<|bos|>{STORY}"
        assert sum(event.prompt.text_lengths) == len(event.prompt.text)
        assert not event.prompt.logprobs
        tokens = server.stub().Tokenize(pb.TokenizeRequest(text=STORY), timeout=HANG_SECONDS)
        assert event.prompt.token_ids == tokens.token_ids
        assert [each.WhichOneof("event") for each in rest] == ["tokens", "finish"]

    def test_tokens_become_text_again(self, server: TargetProcess) -> None:
        stub = server.stub()
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi <|eos|>")])
        made = stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=HANG_SECONDS)
        back = stub.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids), timeout=HANG_SECONDS)
        assert back.text == "<|bos|><|user|>Hi <|eos|><|story|>" == b"".join(made.tokens).decode()
        assert made.max_model_len == 2048
        long = stub.Tokenize(pb.TokenizeRequest(text=STORY * 1500), timeout=HANG_SECONDS)
        assert len(long.tokens) > 4000  # it was read on a thread

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            (pb.TokenizeRequest(), "prompt: is missing"),
            (
                pb.TokenizeRequest(chat=pb.ChatPrompt(messages_json=b"[1]")),
                "messages_json[0]: must",
            ),
            (
                pb.DetokenizeRequest(token_ids=pack_tokens([9999])),
                "token_ids[0]: token 9999 is not",
            ),
        ],
    )
    def test_what_has_no_tokens_is_refused(
        self, server: TargetProcess, message: pb.TokenizeRequest | pb.DetokenizeRequest, words: str
    ) -> None:
        stub = server.stub()
        tokenizes = isinstance(message, pb.TokenizeRequest)
        with pytest.raises(grpc.RpcError) as caught:
            (stub.Tokenize if tokenizes else stub.Detokenize)(message, timeout=HANG_SECONDS)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert words in caught.value.details()

    def test_sequences_are_numbered(self, server: TargetProcess) -> None:
        with server.channel() as channel:
            numbers = [next(_call(channel, request(max_tokens=1))).started.sequence for _ in "ab"]
        assert 0 < numbers[0] < numbers[1]


class TestWhatTheTextShows:
    def story(self, **stop: object) -> pb.GenerateRequest:
        message = request(temperature=0.0, max_tokens=600)
        message.stop.MergeFrom(pb.StopOptions(**stop))  # type: ignore[arg-type]
        return message

    def test_control_tokens_are_spelled_out(self, server: TargetProcess) -> None:
        plain = generate(server, self.story())
        message = self.story(ignore_eos=True, max_tokens=len(plain.tokens) + 2)
        silent = generate(server, message)
        message.output.special_tokens = True
        spelled = generate(server, message)
        assert spelled.tokens == silent.tokens
        assert spelled.text.startswith(f"{plain.text}<|eos|>")
        assert re.sub(r"<\|\w+\|>", "", spelled.text) == silent.text

    def test_stop_strings_are_found_where_they_are_shown(self, server: TargetProcess) -> None:
        """By the engine, too: both end with the same token."""
        plain = generate(server, self.story())
        message = self.story(ignore_eos=True, max_tokens=len(plain.tokens) + 9, strings=["|eos|"])
        assert generate(server, message).finish.reason == pb.FINISH_REASON_LENGTH
        message.output.special_tokens = True
        out = generate(server, message)
        assert out.finish.stop_string == "|eos|"
        assert (out.tokens, out.text) == (plain.tokens, f"{plain.text}<")
        wait_until_idle(server)

    @pytest.mark.parametrize("special", [False, True])
    def test_the_stop_token_is_shown_where_it_has_a_text(
        self, server: TargetProcess, special: bool
    ) -> None:
        message = self.story(include_stop=True)
        message.output.special_tokens = special
        plain, out = generate(server, self.story()), generate(server, message)
        assert out.tokens == plain.tokens
        assert out.text == plain.text + special * "<|eos|>"
        word = plain.tokens[8]
        message.stop.token_ids[:] = [word]
        named, cut = generate(server, message), generate(server, self.story(token_ids=[word]))
        assert named.finish.stop_token_id == word
        assert len(cut.text) < len(named.text)
        assert plain.text.startswith(named.text)

    def test_a_stop_string_is_shown_also_when_it_is_resumed(self, server: TargetProcess) -> None:
        plain = generate(server, self.story())
        words = plain.text.split(" ")
        stop = f"{words[8]} {words[9][:2]}"
        message = self.story(strings=[stop], include_stop=True)
        out = generate(server, message)
        assert out.text == plain.text[: plain.text.index(stop) + len(stop)]
        assert out.finish.stop_string == stop
        for cut in range(1, len(out.tokens)):
            message.generated_token_ids = pack_tokens(out.tokens[:cut])
            rest = generate(server, message)
            assert rest.tokens == out.tokens[cut:]
            assert out.text.endswith(rest.text)
            assert rest.finish.stop_string == stop

    def test_log_probabilities_name_the_bytes_of_tokens(self, server: TargetProcess) -> None:
        message = self.story(max_tokens=12)
        message.logprobs.top_n = 4
        bare = generate(server, message)
        message.logprobs.token_bytes = True
        out = generate(server, message)
        assert b"".join(each.token for each in out.logprobs).decode() == out.text
        for values, without in zip(out.logprobs, bare.logprobs, strict=True):
            assert values.top[0].token == values.token
            assert len({each.token for each in values.top}) == 4
            assert not without.token
            assert [each.token_id for each in without.top] == [e.token_id for e in values.top]
        message.logprobs.ClearField("top_n")
        with pytest.raises(grpc.RpcError, match=r"logprobs.token_bytes: needs chosen, top_n or"):
            generate(server, message)


class TestManyAtOnce:
    @dataclass
    class Case:
        message: pb.GenerateRequest
        cancel_after: int | None = None

    def cases(self) -> list["TestManyAtOnce.Case"]:
        """Mixed lengths, temperatures, seeds, stops, penalties and cancellations."""
        cases = []
        for i in range(32 if FULL else 16):
            message = request(
                text=" ".join(
                    [STORY, *("there was a dog who liked to play." for _ in range(i % 7))]
                ),
                max_tokens=5 + 9 * (i % 11),
                temperature=(0.0, 0.5, 1.0, 1.5)[i % 4],
                seed=i // 2,
                top_p=(1.0, 0.9, 0.6)[i % 3],
                top_k=(0, 20)[i % 2],
                min_p=(0.0, 0.02)[i % 5 == 0],
                repetition_penalty=(1.0, 1.3)[i % 6 == 0],
                presence_penalty=(0.0, 0.7)[i % 7 == 0],
            )
            if i % 3 == 0:
                message.stop.strings[:] = [" the", "said,"]
            if i % 5 == 2:
                message.sampling.frequency_penalty = 0.4
                message.sampling.logit_bias[300 + i] = 3.0
                message.logprobs.top_n = 3
            cases.append(self.Case(message, cancel_after=3 if i % 8 == 5 else None))
        return cases

    def follow(self, server: TargetProcess, case: "TestManyAtOnce.Case") -> Output | None:
        if case.cancel_after is None:
            return generate(server, case.message)
        with server.channel() as channel:
            call = _call(channel, case.message)
            seen = 0
            for response in call:
                seen += len(response.tokens.token_ids)
                if seen >= case.cancel_after:
                    call.cancel()  # type: ignore[attr-defined]
                    return None
        return None

    def test_every_text_equals_the_text_of_the_same_request_alone(
        self, server: TargetProcess
    ) -> None:
        cases = self.cases()
        with ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(lambda case: self.follow(server, case), cases))
        wait_until_idle(server)
        finished = [(c, out) for c, out in zip(cases, together, strict=True) if out is not None]
        assert len(finished) == sum(case.cancel_after is None for case in cases)
        assert {out.finish.reason for _, out in finished} == {
            pb.FINISH_REASON_STOP,
            pb.FINISH_REASON_LENGTH,
        }
        for case, out in finished:
            alone = generate(server, case.message)
            assert (alone.tokens, alone.text) == (out.tokens, out.text)
            assert alone.finish.reason == out.finish.reason
            assert alone.logprobs == out.logprobs  # to the last bit


class TestCancellation:
    """A request that nobody waits for would run for minutes: it must not."""

    def endless(self) -> pb.GenerateRequest:
        message = request(max_tokens=2000)
        message.stop.ignore_eos = True
        return message

    def test_a_client_that_goes_away_frees_its_blocks_within_steps(
        self, server: TargetProcess
    ) -> None:
        ended = server.metrics().get(CANCELLED, 0)
        with server.channel() as channel:
            call = _call(channel, self.endless())
            next(call)
            next(call)
            with engine_held(server.process.pid):
                call.cancel()  # type: ignore[attr-defined]
                wait_until(lambda: server.metrics().get(CANCELLED, 0) > ended)
                before = server.metrics()["ssd_engine_steps_total"]
            idle = wait_until_idle(server)
        # The engine hears of it with its next step.
        assert idle["ssd_engine_steps_total"] - before < 10

    def test_a_deadline_ends_the_request_and_frees_its_blocks(self, server: TargetProcess) -> None:
        ended = server.metrics().get(CANCELLED, 0)
        with engine_held(server.process.pid):
            before = server.metrics()["ssd_engine_steps_total"]
            with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
                for _ in rpc.TargetServiceStub(channel).Generate(self.endless(), timeout=0.5):
                    pass
            wait_until(lambda: server.metrics().get(CANCELLED, 0) > ended)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        assert wait_until_idle(server)["ssd_engine_steps_total"] - before < 10

    @pytest.mark.full
    def test_a_reader_that_stalls_does_not_hold_up_another(self, server: TargetProcess) -> None:
        with server.channel() as channel:
            greedy_reader = request(max_tokens=1000)
            greedy_reader.stop.ignore_eos = True
            greedy_reader.logprobs.top_n = 20  # more than a connection holds in flight
            stalled = _call(channel, greedy_reader)
            next(stalled)
            assert len(generate(server, request(max_tokens=30)).tokens) == 30
            rest = sum(len(response.tokens.token_ids) for response in stalled)
            assert rest == 1000


class TestPrefixCache:
    def test_a_common_prefix_of_1000_tokens_is_computed_once(self, server: TargetProcess) -> None:
        prefix = [5 + (7 * i) % 4000 for i in range(1000)]

        def message(tail: list[int]) -> pb.GenerateRequest:
            tokens = b"".join(t.to_bytes(4, "little") for t in prefix + tail)
            return pb.GenerateRequest(
                token_ids=tokens,
                sampling=pb.SamplingOptions(temperature=0.8, seed=1),
                stop=pb.StopOptions(max_tokens=24, ignore_eos=True),
            )

        before = server.metrics()["ssd_prefix_cache_hit_tokens_total"]
        cold = generate(server, message([42, 43]))
        assert cold.finish.usage.cached_prompt_tokens == 0
        assert server.metrics()["ssd_prefix_cache_hit_tokens_total"] == before
        other = generate(server, message([99, 98, 97]))
        assert other.finish.usage.cached_prompt_tokens == 992
        warm = generate(server, message([42, 43]))
        assert warm.finish.usage.cached_prompt_tokens == 992
        assert server.metrics()["ssd_prefix_cache_hit_tokens_total"] == before + 2 * 992
        assert warm.tokens == cold.tokens


class TestDiscovery:
    def test_model_info_says_what_is_served(self, server: TargetProcess) -> None:
        with server.channel() as channel:
            info = rpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert info.name == "stories-target"
        assert 8e6 < info.num_parameters < 10e6
        assert info.max_model_len == 2048
        assert info.has_chat_template
        assert info.fingerprint
        assert info.dtype == "float32"

    @pytest.mark.parametrize("name", ["liveness", "readiness", "", "ssd.v1.TargetService"])
    def test_health_answers_for(self, server: TargetProcess, name: str) -> None:
        assert server.health(name) == 1

    def test_reflection_lists_the_service(self, server: TargetProcess) -> None:
        from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

        with server.channel() as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = next(stub.ServerReflectionInfo(iter([ask])))
        names = [service.name for service in answer.list_services_response.service]
        assert "ssd.v1.TargetService" in names

    def test_metrics_tell_of_requests_and_times(self, server: TargetProcess) -> None:
        generate(server, request(max_tokens=8))
        metrics = server.metrics()
        assert metrics["ssd_time_to_first_token_seconds_count"] >= 1
        assert metrics["ssd_inter_token_latency_seconds_count"] >= 7
        assert metrics['ssd_requests_total{outcome="length"}'] >= 1
        assert metrics["ssd_generation_tokens_total"] >= 8
        assert 0 <= metrics["ssd_kv_cache_usage_ratio"] <= 1


def endless(channel: grpc.Channel) -> Iterator[pb.GenerateResponse]:
    """A request that was admitted; the engine is held, so that it does not come to its end."""
    message = request(max_tokens=1500)
    message.stop.ignore_eos = True
    call = _call(channel, message)
    assert next(call).WhichOneof("event") == "started"
    return call


def _is_served(server: TargetProcess) -> bool:
    try:
        return len(generate(server, request(max_tokens=5)).tokens) == 5
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--drain-timeout", "0.2")
    metrics = ("--metrics-listen", "127.0.0.1:0")
    with target(tmp_path_factory.mktemp("small"), *flags, *metrics) as server:
        yield server


class TestSmallServer:
    """One with a place to run and one to wait, which ends with the second of these tests."""

    def test_one_request_too_many_is_refused_with_a_retry_delay(self, small: TargetProcess) -> None:
        from google.rpc import error_details_pb2
        from grpc_status import rpc_status

        with small.channel() as channel:
            with engine_held(small.process.pid):
                calls = [endless(channel) for _ in range(2)]
                with pytest.raises(grpc.RpcError) as caught:
                    next(_call(channel, request()))
                for call in calls:
                    call.cancel()  # type: ignore[attr-defined]
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
            status = rpc_status.from_call(caught.value)
            info = error_details_pb2.RetryInfo()
            assert status.details[0].Unpack(info)
            assert info.retry_delay.ToMilliseconds() >= 100
            wait_until(lambda: _is_served(small), "places are given back by the engine")

    def test_the_drain_timeout_cuts_off_what_still_runs(self, small: TargetProcess) -> None:
        with small.channel() as channel, engine_held(small.process.pid):
            call = endless(channel)
            small.terminate()
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert small.wait_for_exit() == 0


def test_the_port_answers_while_the_model_loads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Liveness on, readiness off, a clear answer to those who come too early, and an end in order
    when it is told to stop meanwhile."""
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    with (
        target(tmp_path_factory.mktemp("early"), ready=False) as server,
        engine_held(server.process.pid),
    ):
        with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
            next(_call(channel, request()))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert "loading" in caught.value.details()  # type: ignore[attr-defined]
        info = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[0].Unpack(info)
        assert info.retry_delay.ToMilliseconds() > 0
        assert server.health("liveness") == 1
        server.terminate()
        assert server.wait_for_exit() == 0
        assert "told to stop while loading" in server.log()


def test_a_second_interrupt_does_not_wait(server: TargetProcess) -> None:
    """Comes last: the others need the service."""
    with server.channel() as channel, engine_held(server.process.pid):
        call = endless(channel)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.health("readiness") != 1)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert server.wait_for_exit() == 0
