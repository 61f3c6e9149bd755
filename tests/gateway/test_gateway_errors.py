"""Errors of real targets as callers get them: each names the field that was sent, and the fix."""

import json
import re
from typing import Any

import openai
import pytest

from tests.gateway.callers import ask
from tests.processes import GatewayProcess

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
LONG = "hen " * 4000  # more than the context has room for
SHORT_TOKENS = "\u2603" * 12_000  # more bytes than texts of so many tokens have
MEGABYTES = "hen " * 1_250_000
CONTRACT = re.compile(r"\b(stop|sampling|chat|logprobs|output)\.[a-z]|_json|\btext:|127\.0\.0\.1")


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def refused(front: GatewayProcess, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = ask(front, path, body)
    return answer.status, json.load(answer)["error"]


TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": user(LONG)}, "messages"),
    (CHAT, {"messages": user(SHORT_TOKENS)}, "messages"),
    (CHAT, {"messages": user("hen " * 100_000)}, "messages"),
    (CHAT, {"messages": user("Hi"), "max_tokens": 10**8}, "max_tokens"),
    (CHAT, {"messages": user("Hi"), "max_completion_tokens": 10**8}, "max_completion_tokens"),
    (COMPLETION, {"prompt": LONG}, "prompt"),
    (COMPLETION, {"prompt": SHORT_TOKENS}, "prompt"),
    (COMPLETION, {"prompt": "hen " * 100_000}, "prompt"),
    (COMPLETION, {"prompt": [5] * 2100}, "prompt"),
    (COMPLETION, {"prompt": [[5] * 2048, [6]]}, "prompt"),
    (COMPLETION, {"prompt": "Once", "max_tokens": 5000}, "max_tokens"),
    (TOKENIZE, {"prompt": "hen " * 100_000}, "prompt"),
]
MUCH_TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": user(MEGABYTES)}, "messages"),
    (COMPLETION, {"prompt": MEGABYTES}, "prompt"),
    (TOKENIZE, {"prompt": MEGABYTES}, "prompt"),
    (TOKENIZE, {"messages": user(MEGABYTES)}, "messages"),
]
ROOM = r"This model's maximum context length is \d+ tokens\. However, you requested \d+ .*"
BOUND = r"\w+: the request has \d+ bytes for the model's server, which takes \d+; make it .*"


@pytest.mark.parametrize(
    ("path", "body", "param", "status", "code", "words"),
    [
        *((*each, 400, "context_length_exceeded", ROOM) for each in TOO_LONG),
        *((*each, 413, "request_too_large", BOUND) for each in MUCH_TOO_LONG),
    ],
)
def test_what_there_is_no_room_for_has_a_code(
    gateway: GatewayProcess,
    path: str,
    body: dict[str, Any],
    param: str,
    status: int,
    code: str,
    words: str,
) -> None:
    answered, error = refused(gateway, path, body)
    told = answered, error["param"], error["code"], error["type"]
    log = gateway.log()[-3000:] if answered == 500 else ""
    assert told == (status, param, code, "invalid_request_error"), f"{error}\n{log}"
    assert re.fullmatch(words, error["message"]), error
    assert error["message"].endswith(" (context_length_exceeded)") == (status == 400)
    assert CONTRACT.search(error["message"]) is None


NAMED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (CHAT, {"messages": [{"role": ""}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (
        CHAT,
        {"chat_template_kwargs": {"messages": 1}, "reasoning_effort": "low"},
        "chat_template_kwargs",
    ),
    (CHAT, {"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": nested(400)}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": nested(24)}, "chat_template_kwargs"),
    (CHAT, {"reasoning_effort": "x" * 20_000}, "reasoning_effort"),
    (CHAT, {"request_id": "x" * 300}, "request_id"),
    (CHAT, {"cache_salt": "x" * 300}, "cache_salt"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"top_p": 1.5}, "top_p"),
    (CHAT, {"max_tokens": "many"}, "max_tokens"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"logit_bias": {"cat": 1}}, "logit_bias"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"speculation": {"mode": "fast"}}, "speculation.mode"),
    (CHAT, {"messages": []}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"stop_token_ids": [10**9]}, "stop_token_ids"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": [5, 10**9]}, "prompt[1]"),
    (COMPLETION, {"prompt": [[5], [5, 10**9]]}, "prompt"),
    (COMPLETION, {"logit_bias": {"1000000": 1}}, "logit_bias"),
    (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETION, {"min_tokens": 5, "regex": "a+"}, "min_tokens"),
    (COMPLETION, {"ignore_eos": True, "regex": "a+"}, "ignore_eos"),
    (COMPLETION, {"speculation": {"depth": 1000}}, "speculation.depth"),
    (TOKENIZE, {"messages": [{"role": ""}]}, "messages[0].role"),
    (DETOKENIZE, {"tokens": [5, 10**9]}, "tokens[1]"),
]


@pytest.mark.parametrize(("path", "changes", "param"), NAMED)
def test_an_error_names_the_field_that_was_sent(
    gateway: GatewayProcess, path: str, changes: dict[str, Any], param: str
) -> None:
    usual = {CHAT: {"messages": user("Hi")}, COMPLETION: {"prompt": "Once"}}.get(path, {})
    status, error = refused(gateway, path, {**usual, **changes})
    told = status, error["param"], error["type"]
    assert told == (400, param, "invalid_request_error"), error
    assert error["message"].startswith(f"{param}: ")
    assert CONTRACT.search(error["message"]) is None, error
    assert error["code"] != "context_length_exceeded"


def test_template_names_may_be_nested(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="stories-target",
        messages=user("Hi"),  # type: ignore[arg-type]
        max_tokens=1,
        extra_body={"chat_template_kwargs": nested(22)},
    )
    assert answer.choices
