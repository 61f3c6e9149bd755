"""The gateway as applications call it: with the openai SDK, against real processes."""

import json
from typing import Any

import openai

from tests.gateway.callers import ask, in_flight
from tests.processes import GatewayProcess, TracedPair
from tests.waiting import wait_until

PROMPT = "Once upon a time there was a small dragon"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a brave hen."}]


def complete(sdk: openai.OpenAI, **content: Any) -> Any:
    asked = {"model": "stories-target", "prompt": PROMPT, "max_tokens": 24, "seed": 9}
    return sdk.completions.create(**{**asked, **content})


def chat(sdk: openai.OpenAI, **content: Any) -> Any:
    asked = {"model": "stories-target", "messages": MESSAGES, "seed": 5}
    return sdk.chat.completions.create(**{**asked, **content})


def test_a_stream_ends_with_its_usage(sdk: openai.OpenAI) -> None:
    whole = chat(sdk, max_tokens=40)
    options = {"include_usage": True}
    chunks = list(chat(sdk, max_tokens=40, stream=True, stream_options=options))
    *others, last = chunks
    first = others[0].choices[0].delta
    assert (first.role, bool(first.content)) == ("assistant", True)  # in one chunk
    text = "".join(chunk.choices[0].delta.content or "" for chunk in others)
    assert text == whole.choices[0].message.content
    assert others[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.usage for chunk in others} == {None}
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    spoken = last.model_extra["metrics"]
    assert spoken["ssd"]["mode"] in ("ssd", "sync", "off")
    assert spoken["speculative_decoding"]["num_draft_tokens"] >= 0


def test_tokens_are_told_with_their_origins(sdk: openai.OpenAI) -> None:
    told = {"return_token_ids": True, "return_token_origins": True, "speculation": {"mode": "ssd"}}
    asked = complete(sdk, extra_body=told).choices[0]
    assert asked.text == complete(sdk, extra_body={"speculative": False}).choices[0].text
    extra = asked.model_extra
    assert (len(extra["token_ids"]), extra["prompt_token_ids"] != []) == (24, True)
    assert "".join(each["text"] for each in extra["token_origins"]) == asked.text
    assert {each["origin"] for each in extra["token_origins"]} > {"target"}


def test_prompts_of_every_kind_and_their_tokens(
    sdk: openai.OpenAI, gateway: GatewayProcess
) -> None:
    def post(path: str, content: Any) -> Any:
        return json.load(ask(gateway, path, content))

    texts = [PROMPT, "The old clock"]
    tokens = [post("/tokenize", {"prompt": text})["tokens"] for text in texts]
    single = [complete(sdk, prompt=text).choices[0].text for text in texts]
    for prompt in (texts, tokens):
        assert [choice.text for choice in complete(sdk, prompt=prompt).choices] == single
    assert post("/detokenize", {"tokens": tokens[0]})["prompt"].endswith(PROMPT)
    told = post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])


def test_an_echo_with_log_probabilities(sdk: openai.OpenAI) -> None:
    answer = complete(sdk, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, answer.usage.completion_tokens) == (PROMPT, 0)
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert max(others) <= 0
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 1 + len(others)


def test_a_cancelled_stream_frees_its_sequences(
    sdk: openai.OpenAI, gateway: GatewayProcess, traced_pair: TracedPair
) -> None:
    """They would not end by themselves for long."""
    many: Any = {"n": 8, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with complete(sdk, stream=True, **many) as stream:
        next(iter(stream))
    wait_until(lambda: in_flight(traced_pair[0]) == 0, gateway.log)
