"""The target as a user meets it: one real process on loopback, the shipped model."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from tests.process_tree import engine_held
from tests.processes import Output, TargetProcess, collect, target, wait_until_idle
from tests.suite.scale import FULL
from tests.target.refusals import refusal, retry_seconds
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time"
CANCELLED = 'ssd_requests_total{outcome="cancelled"}'
GREEDY = {"temperature": 0.0}
EOS = 1
ENDS_EARLY = {**GREEDY, "logit_bias": {EOS: 100.0}}  # as soon as it may


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    flags = ("--metrics-listen", "127.0.0.1:0", "--max-message-mib", "4")
    with target(tmp_path_factory.mktemp("target"), *flags) as process:
        yield process


def request(max_tokens: int = 40, **fields: Any) -> pb.GenerateRequest:
    """A greedy continuation of a story, unless a field says otherwise."""
    stop = {"max_tokens": max_tokens, **fields.pop("stop", {})}
    prompt = {} if {"chat", "token_ids"} & fields.keys() else {"text": STORY}
    return pb.GenerateRequest(**{**prompt, "sampling": GREEDY, "stop": stop, **fields})


def call(server: TargetProcess, message: pb.GenerateRequest) -> Any:
    return server.stub().Generate(message, timeout=HANG_SECONDS)


def ask(server: TargetProcess, max_tokens: int = 40, **fields: Any) -> Output:
    return collect(call(server, request(max_tokens, **fields)))


def test_no_seed_given_draws_one_and_returns_it(server: TargetProcess) -> None:
    first, second = (ask(server, sampling={}) for _ in range(2))
    assert first.seed != second.seed
    assert ask(server, sampling={"seed": first.seed}).tokens == first.tokens


def test_nothing_stops_before_min_tokens(server: TargetProcess) -> None:
    """Stop tokens are not drawn, log probabilities stay the model's; stop strings are text."""
    whole = ask(server)
    token = whole.tokens[10]
    stop = {"token_ids": [token], "strings": [whole.text[4:9]], "min_tokens": 25}
    out = ask(server, stop=stop, logprobs={"top_n": 1})
    first = whole.tokens.index(token)
    assert len(out.tokens) >= 25
    assert token not in out.tokens[:25]
    assert out.tokens[:first] == whole.tokens[:first]
    assert out.logprobs[first].top[0].token_id == token
    assert out.text.startswith(whole.text[:9])


def test_a_resumed_request_counts_what_was_generated_towards_min_tokens(
    server: TargetProcess,
) -> None:
    stop = {"token_ids": set(ask(server, 20).tokens), "min_tokens": 10}
    once = ask(server, stop=stop)
    assert once.finish.reason == pb.FINISH_REASON_STOP
    for given in (4, 10):
        rest = ask(server, stop=stop, generated_token_ids=pack_tokens(once.tokens[:given]))
        assert rest.tokens == once.tokens[given:]


def test_prompt_logprobs_are_those_of_transformers(server: TargetProcess) -> None:
    """Whatever is cached of the prompt; and they change nothing about the text."""
    text = "Once upon a time there was a lamb who could sing. " * 30
    plain = ask(server, 5, text=text)
    out = ask(server, 5, text=text, logprobs={"prompt": True, "top_n": 3})
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


def test_logprobs_are_the_models_own_whatever_the_sampling(server: TargetProcess) -> None:
    out = ask(server, 20, logprobs={"top_n": 5, "token_bytes": True})
    for token, values in zip(out.tokens, out.logprobs, strict=True):
        likeliest = [each.logprob for each in values.top]
        assert likeliest == sorted(likeliest, reverse=True)
        assert (values.top[0].token_id, values.top[0].token) == (token, values.token)
        assert values.chosen == pytest.approx(likeliest[0])
        assert len({each.token for each in values.top}) == 5
    assert b"".join(each.token for each in out.logprobs).decode() == out.text
    forced = ask(server, 20, sampling={"temperature": 2.0, "top_k": 1}, logprobs={"chosen": True})
    assert forced.tokens == out.tokens
    assert [each.chosen for each in forced.logprobs] == [each.chosen for each in out.logprobs]
    assert not any(each.top or each.token for each in forced.logprobs)


def test_generated_tokens_are_counted_and_not_streamed_again(server: TargetProcess) -> None:
    """Where all were, the request ends at once."""
    sampling = {"seed": 11, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    whole = ask(server, sampling=sampling)
    for cut in (1, 17, 40):
        generated = pack_tokens(whole.tokens[:cut])
        rest = ask(server, sampling=sampling, generated_token_ids=generated)
        assert rest.tokens == whole.tokens[cut:]
        assert rest.finish.usage.completion_tokens == 40
        assert rest.finish.reason == pb.FINISH_REASON_LENGTH
        assert whole.text.endswith(rest.text)


class TestPrompts:
    def test_messages_in_json_are_answered_as_those_in_fields(self, server: TargetProcess) -> None:
        text = "Tell me a story about a shy lamb."
        parts = [{"type": "text", "text": text}]
        messages = json.dumps([{"role": "user", "content": parts, "name": "Zoë"}]).encode()
        fields = ask(server, 10, chat={"messages": [{"role": "user", "content": text}]})
        assert ask(server, 10, chat={"messages_json": messages}).tokens == fields.tokens

    def test_the_prompt_comes_back_as_it_was_read(self, server: TargetProcess) -> None:
        """To those who resume, too, if they ask; here a message is continued."""
        said = [{"role": "user", "content": "A lamb."}, {"role": "assistant", "content": "It"}]
        chat = {"messages": said, "continue_final_message": True}
        generated = pack_tokens([300])
        message = request(2, chat=chat, return_prompt=True, generated_token_ids=generated)
        started, event, *rest = call(server, message)
        assert event.prompt.text == "<|bos|><|user|>A lamb.<|story|>It"
        assert sum(event.prompt.text_lengths) == len(event.prompt.text)
        assert len(event.prompt.token_ids) == 4 * started.started.prompt_tokens
        assert not event.prompt.logprobs
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


class TestWhatTheTextShows:
    @pytest.mark.parametrize("special", [False, True])
    def test_the_end_of_the_story_is_shown_where_that_is_asked_for(
        self, server: TargetProcess, special: bool
    ) -> None:
        output, shown = {"special_tokens": special}, special * "<|eos|>"
        sampling = {"sampling": ENDS_EARLY, "output": output}
        plain, out = (
            ask(server, stop={"min_tokens": 20, "include_stop": include}, **sampling)
            for include in (False, True)
        )
        assert plain.finish.reason == pb.FINISH_REASON_STOP
        assert plain.finish.stop_token_id == EOS
        assert len(plain.tokens) == 21
        assert (out.tokens, out.text) == (plain.tokens, plain.text + shown)

    def test_control_tokens_are_spelled_out(self, server: TargetProcess) -> None:
        """Where the story is not to end with them, and stop strings are found among them: by the
        engine, too."""
        stop = {"ignore_eos": True, "strings": ["|eos|>" * 3]}
        silent = ask(server, stop=stop, sampling=ENDS_EARLY)
        assert silent.finish.reason == pb.FINISH_REASON_LENGTH
        assert silent.tokens.count(EOS) > 9
        output = {"special_tokens": True}
        spelled = ask(server, sampling=ENDS_EARLY, stop={"ignore_eos": True}, output=output)
        assert spelled.tokens == silent.tokens
        assert re.sub(r"<\|\w+\|>", "", spelled.text) == silent.text
        stop["strings"] = ["|eos|"]
        out = ask(server, stop=stop, sampling=ENDS_EARLY, output=output)
        first = silent.tokens.index(EOS)
        assert out.finish.stop_string == "|eos|"
        assert out.tokens == silent.tokens[: first + 1]
        assert out.text == spelled.text[: spelled.text.index("|eos|")]
        wait_until_idle(server)

    @pytest.mark.parametrize("include", [False, True])
    def test_what_stopped_the_text_is_shown_also_when_it_is_resumed(
        self, server: TargetProcess, include: bool
    ) -> None:
        plain = ask(server)
        words = plain.text.split(" ")
        string = f"{words[8]} {words[9][:2]}"
        stop = {"strings": ["never there", string], "include_stop": include}
        out = ask(server, stop=stop)
        assert out.text == plain.text[: plain.text.index(string) + include * len(string)]
        assert out.finish.reason == pb.FINISH_REASON_STOP
        assert out.finish.usage.completion_tokens == len(out.tokens)
        for cut in range(0, len(out.tokens), 3):
            rest = ask(server, stop=stop, generated_token_ids=pack_tokens(out.tokens[:cut]))
            assert rest.tokens == out.tokens[cut:]
            assert out.text.endswith(rest.text)
            assert rest.finish.stop_string == string


class TestManyAtOnce:
    """Mixed lengths, temperatures, seeds, stops, penalties and cancellations."""

    CASES = 32 if FULL else 8

    def message(self, i: int) -> pb.GenerateRequest:
        sampling: dict[str, Any] = dict(
            temperature=(0.0, 0.5, 1.0, 1.5)[i % 4],
            seed=i // 2,
            top_p=(1.0, 0.9, 0.6)[i % 3],
            top_k=(0, 20)[i % 2],
            min_p=(0.0, 0.02)[i % 5 == 0],
            repetition_penalty=(1.0, 1.3)[i % 6 == 0],
            presence_penalty=(0.0, 0.7)[i % 7 == 0],
        )
        fields: dict[str, Any] = {"sampling": sampling}
        fields["text"] = STORY + " there was a dog who liked to play." * (i % 7)
        if i % 3 == 0:
            fields["stop"] = {"strings": [" the", "said,"]}
        if i % 5 == 2:
            sampling |= {"frequency_penalty": 0.4, "logit_bias": {300 + i: 3.0}}
            fields["logprobs"] = {"top_n": 3}
        return request(5 + 9 * (i % 11), **fields)

    def follow(self, server: TargetProcess, number: int) -> Output | None:
        """Some are left in the middle."""
        stream = call(server, self.message(number))
        if number % 8 == 5:
            next(stream)
            next(stream)
            stream.cancel()
            return None
        return collect(stream)

    def test_every_text_equals_the_text_of_the_same_request_alone(
        self, server: TargetProcess
    ) -> None:
        with ThreadPoolExecutor(self.CASES) as pool:
            together = list(pool.map(lambda i: self.follow(server, i), range(self.CASES)))
        wait_until_idle(server)
        reasons = {out.finish.reason for out in together if out is not None}
        assert reasons == {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH}
        for i, out in enumerate(together):
            if out is not None:
                alone = collect(call(server, self.message(i)))
                assert (alone.tokens, alone.text) == (out.tokens, out.text)
                assert alone.finish.reason == out.finish.reason
                assert alone.logprobs == out.logprobs  # to the last bit


def endless(server: TargetProcess) -> Any:
    """A request that was admitted, and would run for minutes."""
    stream = call(server, request(1500, stop={"ignore_eos": True}))
    assert next(stream).WhichOneof("event") == "started"
    return stream


class TestCancellation:
    """The engine hears with its next step of a request that nobody waits for."""

    def test_a_client_that_goes_away_frees_its_blocks_within_steps(
        self, server: TargetProcess
    ) -> None:
        ended = server.metrics().get(CANCELLED, 0)
        stream = endless(server)
        next(stream)
        with engine_held(server.process.pid):
            stream.cancel()
            wait_until(lambda: server.metrics().get(CANCELLED, 0) > ended)
            before = server.metrics()["ssd_engine_steps_total"]
        assert wait_until_idle(server)["ssd_engine_steps_total"] - before < 10

    def test_a_deadline_ends_the_request_and_frees_its_blocks(self, server: TargetProcess) -> None:
        ended = server.metrics().get(CANCELLED, 0)
        with engine_held(server.process.pid):
            before = server.metrics()["ssd_engine_steps_total"]
            stream = server.stub().Generate(request(1500), timeout=0.5)
            refusal(stream, grpc.StatusCode.DEADLINE_EXCEEDED)
            wait_until(lambda: server.metrics().get(CANCELLED, 0) > ended)
        assert wait_until_idle(server)["ssd_engine_steps_total"] - before < 10


class TestPrefixCache:
    def test_a_common_prefix_of_1000_tokens_is_computed_once(self, server: TargetProcess) -> None:
        prefix = [5 + (7 * i) % 4000 for i in range(1000)]

        def after_prefix(*tail: int) -> Output:
            tokens = pack_tokens([*prefix, *tail])
            return ask(server, 24, token_ids=tokens, sampling={"temperature": 0.8, "seed": 1})

        before = server.metrics()["ssd_prefix_cache_hit_tokens_total"]
        cold, other, warm = after_prefix(42, 43), after_prefix(99, 98, 97), after_prefix(42, 43)
        hits = [each.finish.usage.cached_prompt_tokens for each in (cold, other, warm)]
        assert hits == [0, 992, 992]
        assert server.metrics()["ssd_prefix_cache_hit_tokens_total"] == before + 2 * 992
        assert warm.tokens == cold.tokens


class TestDiscovery:
    @pytest.mark.parametrize("name", ["liveness", "readiness", "", "ssd.v1.TargetService"])
    def test_health_answers_for(self, server: TargetProcess, name: str) -> None:
        assert server.health(name) == 1

    def test_metrics_tell_of_requests_and_times(self, server: TargetProcess) -> None:
        ask(server, 8)
        metrics = server.metrics()
        assert metrics["ssd_time_to_first_token_seconds_count"] >= 1
        assert metrics["ssd_inter_token_latency_seconds_count"] >= 7
        assert metrics['ssd_requests_total{outcome="length"}'] >= 1
        assert metrics["ssd_generation_tokens_total"] >= 8
        assert 0 <= metrics["ssd_kv_cache_usage_ratio"] <= 1


def _is_served(server: TargetProcess) -> bool:
    try:
        return len(ask(server, 5).tokens) == 5
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--drain-timeout", "0.2")
    with target(tmp_path_factory.mktemp("small"), *flags) as server:
        yield server


class TestSmallServer:
    """One with a place to run and one to wait, which ends with the second of these tests."""

    def test_one_request_too_many_is_refused_with_a_retry_delay(self, small: TargetProcess) -> None:
        with engine_held(small.process.pid):
            streams = [endless(small) for _ in range(2)]
            error = refusal(call(small, request()), grpc.StatusCode.RESOURCE_EXHAUSTED)
            for stream in streams:
                stream.cancel()
        assert retry_seconds(error) >= 0.1
        wait_until(lambda: _is_served(small), "places are given back by the engine")

    def test_the_drain_timeout_cuts_off_what_still_runs(self, small: TargetProcess) -> None:
        with engine_held(small.process.pid):
            stream = endless(small)
            small.terminate()
            refusal(stream, grpc.StatusCode.UNAVAILABLE)
            assert small.wait_for_exit() == 0


def test_the_port_answers_while_the_model_loads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Liveness on, readiness off, a clear answer to those who come too early, and an end in order
    when it is told to stop meanwhile."""
    with (
        target(tmp_path_factory.mktemp("early"), ready=False) as server,
        engine_held(server.process.pid),
    ):
        error = refusal(call(server, request()), grpc.StatusCode.UNAVAILABLE)
        assert "loading" in error.details()
        assert retry_seconds(error) > 0
        assert server.health("liveness") == 1
        server.terminate()
        assert server.wait_for_exit() == 0
        assert "told to stop while loading" in server.log()


def test_a_second_interrupt_does_not_wait(server: TargetProcess) -> None:
    """Comes last: the others need the service."""
    with engine_held(server.process.pid):
        stream = endless(server)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.health("readiness") != 1)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError):
            list(stream)
        assert server.wait_for_exit() == 0
