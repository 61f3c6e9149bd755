"""The gateway as applications call it: with the openai SDK, against real processes."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from ssd.v1 import target_pb2 as pb
from tests.client import scripted_target
from tests.processes import GatewayProcess, Output, TracedPair, collect
from tests.processes import gateway as start_gateway
from tests.waiting import HANG_SECONDS, wait_until

PROMPT = "Once upon a time there was a small dragon"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a brave hen."}]


def by_grpc(traced_pair: TracedPair, **parts: Any) -> Output:
    """The same from the target itself, without speculation."""
    request = pb.GenerateRequest(**parts)
    request.speculation.mode = pb.SPECULATION_MODE_OFF
    return collect(traced_pair[0].stub().Generate(request))


def test_a_completion_is_the_target_s_text(sdk: openai.OpenAI, traced_pair: TracedPair) -> None:
    answer = sdk.completions.create(model="stories-target", prompt=PROMPT, max_tokens=30, seed=7)
    sampling = pb.SamplingOptions(seed=7)
    direct = by_grpc(traced_pair, text=PROMPT, sampling=sampling, stop={"max_tokens": 30})
    assert answer.choices[0].text == direct.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.prompt_tokens == direct.finish.usage.prompt_tokens


def test_sixteen_tokens_where_no_number_is_said(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="stories-target", prompt=PROMPT, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_chat_is_the_target_s_text(sdk: openai.OpenAI, traced_pair: TracedPair) -> None:
    answer = sdk.chat.completions.create(
        model="stories-target", messages=MESSAGES, seed=-3, max_completion_tokens=40
    )
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(**MESSAGES[0])])
    sampling = pb.SamplingOptions(seed=2**64 - 3)
    direct = by_grpc(traced_pair, chat=chat, sampling=sampling, stop={"max_tokens": 40})
    assert answer.choices[0].message.content == direct.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.system_fingerprint


def test_text_parts_are_one_message(sdk: openai.OpenAI) -> None:
    def told(content: Any) -> str | None:
        answer = sdk.chat.completions.create(
            model="stories-target",
            messages=[{"role": "user", "content": content}],
            seed=1,
            max_tokens=12,
        )
        return answer.choices[0].message.content

    text = MESSAGES[0]["content"]
    assert told([{"type": "text", "text": text}]) == told(text)


def test_a_stream_ends_with_its_usage(sdk: openai.OpenAI) -> None:
    ask: Any = {"model": "stories-target", "messages": MESSAGES, "seed": 4, "max_tokens": 40}
    whole = sdk.chat.completions.create(**ask)
    chunks = list(
        sdk.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content  # role and first text in one chunk
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    spoken = (last.model_extra or {})["metrics"]
    assert spoken["ssd"]["mode"] in ("ssd", "sync", "off")
    assert spoken["speculative_decoding"]["num_draft_tokens"] >= 0


@pytest.mark.parametrize("mode", ["off", "sync", "ssd"])
def test_a_mode_changes_no_token(sdk: openai.OpenAI, mode: str) -> None:
    def told(**more: Any) -> Any:
        return sdk.completions.create(
            model="stories-target", prompt=PROMPT, max_tokens=40, seed=11, extra_body=more
        )

    asked = told(speculation={"mode": mode}, return_token_ids=True, return_token_origins=True)
    assert asked.choices[0].text == told(speculative=False).choices[0].text
    extra = asked.choices[0].model_extra
    assert len(extra["token_ids"]) == 40
    assert extra["prompt_token_ids"]
    assert "".join(each["text"] for each in extra["token_origins"]) == asked.choices[0].text
    origins = {each["origin"] for each in extra["token_origins"]}
    assert origins <= {"target", "cache", "just_in_time", "ngram", "sync", "grammar"}
    assert (origins == {"target"}) == (mode == "off")


def test_choices_have_seeds_of_their_own(sdk: openai.OpenAI) -> None:
    ask: Any = {"model": "stories-target", "prompt": PROMPT, "max_tokens": 24, "seed": 9}
    several = sdk.completions.create(**ask, n=3)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == sdk.completions.create(**ask).choices[0].text
    streamed = ["", "", ""]
    for chunk in sdk.completions.create(**ask, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert several.usage is not None
    assert several.usage.completion_tokens == 72


def test_prompts_of_every_kind(sdk: openai.OpenAI, gateway: GatewayProcess) -> None:
    def post(path: str, content: Any) -> Any:
        request = urllib.request.Request(
            gateway.url + path, json.dumps(content).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    ask: Any = {"model": "stories-target", "max_tokens": 10, "seed": 2}
    texts = [PROMPT, "The old clock"]
    tokens = [post("/tokenize", {"prompt": text})["tokens"] for text in texts]
    single = [sdk.completions.create(prompt=text, **ask).choices[0].text for text in texts]
    for prompt in (texts, tokens):
        several = sdk.completions.create(prompt=prompt, **ask)
        assert [choice.text for choice in several.choices] == single
    assert sdk.completions.create(prompt=tokens[0], **ask).choices[0].text == single[0]
    assert post("/detokenize", {"tokens": tokens[0]})["prompt"].endswith(PROMPT)
    told = post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])


def test_log_probabilities_of_a_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="stories-target",
        messages=MESSAGES,
        seed=5,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert len(content.content) == 12
    text = b"".join(bytes(each.bytes or []) for each in content.content).decode()
    assert text == answer.choices[0].message.content
    for each in content.content:
        assert each.logprob <= 0
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob


def test_an_echo_with_log_probabilities(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="stories-target", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == PROMPT
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(each is not None and each <= 0 for each in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens or []) == len(logprobs.text_offset or [])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_stops_and_biases(sdk: openai.OpenAI) -> None:
    ask: Any = {"model": "stories-target", "prompt": PROMPT, "max_tokens": 60, "seed": 3}
    whole = sdk.completions.create(**ask).choices[0].text
    word = whole.split()[5]
    stopped = sdk.completions.create(**ask, stop=word).choices[0]
    assert stopped.text == whole[: whole.index(word)]
    assert stopped.finish_reason == "stop"
    assert (stopped.model_extra or {})["stop_reason"] == word
    kept = sdk.completions.create(
        **ask, stop=[word], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == whole[: whole.index(word) + len(word)]
    biased = sdk.completions.create(**ask, logit_bias={"300": 100})
    assert biased.choices[0].text != whole


def test_models_are_listed(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert model.id == "stories-target"
    assert sdk.models.retrieve("stories-target").id == model.id
    assert (model.model_extra or {})["max_model_len"] == 2048


def refused(sdk: openai.OpenAI, **changes: Any) -> openai.APIStatusError:
    ask = {"model": "stories-target", "messages": MESSAGES, "max_tokens": 4, **changes}
    with pytest.raises(openai.APIStatusError) as error:
        sdk.chat.completions.create(**ask)
    return error.value


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"speculation": {"mode": "fast"}}}, "speculation.mode"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens"),
        ({"extra_body": {"beam_width": 4}}, "beam_width"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    sdk: openai.OpenAI, changes: dict[str, Any], param: str
) -> None:
    error = refused(sdk, **changes)
    assert error.status_code == 400
    assert isinstance(error.body, dict)
    assert str(error.body["param"]).startswith(param), error.body
    assert error.body["type"] == "invalid_request_error"


def test_too_long_a_prompt_is_said_to_be_so(sdk: openai.OpenAI) -> None:
    error = refused(sdk, messages=[{"role": "user", "content": "hen " * 4000}])
    assert (error.status_code, error.code) == (400, "context_length_exceeded")


def test_an_unknown_model_is_not_found(sdk: openai.OpenAI) -> None:
    error = refused(sdk, model="gpt-5")
    assert (error.status_code, error.code) == (404, "model_not_found")
    assert "stories-target" in error.message


def test_raw_responses_carry_the_request_s_id(sdk: openai.OpenAI) -> None:
    raw = sdk.completions.with_raw_response.create(
        model="stories-target", prompt=PROMPT, max_tokens=2, extra_headers={"X-Request-Id": "hen-1"}
    )
    assert raw.headers["x-request-id"] == "hen-1"
    assert raw.parse().choices[0].text


def leave_early(front: GatewayProcess, **ask: Any) -> None:
    """Asks for a stream, and goes after its first chunk."""

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="none") as sdk:
            stream = await sdk.completions.create(stream=True, **ask)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())


def test_a_cancelled_stream_frees_its_sequences(
    gateway: GatewayProcess, traced_pair: TracedPair
) -> None:
    """There are so many that they would not end by themselves for minutes."""
    many: Any = {"prompt": [PROMPT, PROMPT], "n": 128, "max_tokens": 1900}
    leave_early(gateway, model="stories-target", **many, extra_body={"ignore_eos": True})

    def running() -> int:
        info = traced_pair[0].stub().GetModelInfo(pb.GetModelInfoRequest())
        return int(info.load.running + info.load.waiting)

    wait_until(lambda: running() == 0, gateway.log)


def test_a_stream_that_would_never_end_is_cancelled_at_its_target(tmp_path: Path) -> None:
    with scripted_target.serve(scripted_target.Script(hang_after=3)) as target:
        target.set_ready()
        with start_gateway(tmp_path, targets=[target.address]) as front:
            leave_early(front, model="scripted", prompt=PROMPT)
            assert target.target.cancelled.wait(HANG_SECONDS)


def test_a_server_that_leaves_is_503_with_its_own_delay(tmp_path: Path) -> None:
    refuse = scripted_target.leaving("the server leaves", 7.0)
    with scripted_target.serve(scripted_target.Script(refuse=refuse)) as target:
        target.set_ready()
        with (
            start_gateway(tmp_path, targets=[target.address]) as front,
            openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as sdk,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            sdk.completions.create(model="scripted", prompt=PROMPT)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.request_id


def test_no_target_at_all_is_503_after_which_it_is_worth_trying_again(tmp_path: Path) -> None:
    with (
        start_gateway(tmp_path, targets=["127.0.0.1:1"], ready=False) as front,
        openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as sdk,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        sdk.completions.create(model="stories-target", prompt=PROMPT)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
