"""Texts and chats become the tokens that a request would have, and tokens their text."""

from functools import cache
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.front.requests import RequestLimits, parse_prompt
from ssd_target.front.tokenizing import detokenize, tokenize

TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested"
DIRECTORY = resolve_model("stories-target")
CONFIG = load_model_config(DIRECTORY)
LIMITS = RequestLimits(CONFIG.vocab_size, 64, 64, CONFIG.eos_token_ids)
JSON_CHAT = pb.ChatPrompt(messages_json=b'[{"role": "user", "content": "Hi <|eos|>"}]')
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi <|eos|>")])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DIRECTORY, CONFIG)


def asked(most: int | None = None, **fields: Any) -> list[int]:
    response = tokenize(pb.TokenizeRequest(**fields), tokenizer(), LIMITS, most)
    tokens = unpack_tokens(response.token_ids)
    assert response.tokens == [tokenizer().spelled_bytes[token] for token in tokens]
    assert response.max_model_len == 64
    return tokens


def spelled(tokens: list[int]) -> str:
    message = pb.DetokenizeRequest(token_ids=pack_tokens(tokens))
    return detokenize(message, tokenizer(), LIMITS, None).text


@pytest.mark.parametrize(
    "prompt", [{"text": "Zoë <|eos|> 🙂"}, {"chat": CHAT}, {"chat": JSON_CHAT}]
)
def test_they_are_the_tokens_of_a_prompt(prompt: dict[str, Any]) -> None:
    tokens = asked(**prompt)
    assert tokens == parse_prompt(pb.GenerateRequest(**prompt), tokenizer(), LIMITS)
    text = "<|bos|>Zoë <|eos|> 🙂" if "text" in prompt else "<|bos|><|user|>Hi <|eos|><|story|>"
    assert spelled(tokens) == text


def test_a_text_may_go_without_the_tokens_that_the_tokenizer_adds() -> None:
    assert asked(text="Once", add_special_tokens=True) == asked(text="Once")
    assert asked(text="Once", add_special_tokens=False) == asked(text="Once")[1:]
    assert asked(text="", add_special_tokens=False) == []


def test_more_tokens_than_the_context_has_are_counted_all_the_same() -> None:
    assert len(asked(text="\n\t" * 100)) > LIMITS.max_model_len


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "prompt: is missing: set text or chat"),
        ({"text": "x" * 10_000}, f"text: {TOO_LONG} 10000 bytes"),
        ({"text": "x" * 1200, "most": 8}, "text: 1200 bytes, and 8 tokens are allowed"),
        ({"chat": CHAT, "add_special_tokens": False}, "add_special_tokens: is for text"),
        ({"chat": pb.ChatPrompt()}, "chat.messages: is empty"),
        (
            {"chat": pb.ChatPrompt(messages_json=b"[" + b" " * 300_000)},
            f"chat.messages_json: {TOO_LONG} 300001 bytes, at most 264176",
        ),
        (
            {"chat": pb.ChatPrompt(messages_json=b'[{"role":"u","x":["%s"]}]' % (b"x" * 10_000))},
            f"chat.messages_json: {TOO_LONG} 10000 bytes",
        ),
    ],
)
def test_what_is_no_prompt_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        asked(**fields)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (pack_tokens([5, 70_000]), r"^token_ids\[1\]: token 70000 is not in the vocabulary"),
        (pack_tokens([5] * 65), rf"^token_ids: {TOO_LONG} 65 tokens"),
        (b"abc", r"^token_ids: 3 bytes are not a multiple of 4"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused_by_name(
    token_ids: bytes, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        detokenize(pb.DetokenizeRequest(token_ids=token_ids), tokenizer(), LIMITS, None)
    assert spelled([]) == ""
