"""Answers Tokenize and Detokenize: the tokens of a prompt, and the text of tokens."""

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.text.token_ids import pack_tokens
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.front.requests import (
    RequestLimits,
    check_not_hopeless,
    encode_chat,
    parse_token_ids,
)


def tokenize(
    message: pb.TokenizeRequest, tokenizer: Tokenizer, limits: RequestLimits, most: int | None
) -> pb.TokenizeResponse:
    """``most``: prompt tokens that the caller may send to Generate. Here there may be more, as
    long as their text is not far longer than such prompts are."""
    tokens = _encode(message, tokenizer, limits, most)
    return pb.TokenizeResponse(
        token_ids=pack_tokens(tokens),
        tokens=[tokenizer.spelled_bytes[token] for token in tokens],
        max_model_len=limits.max_model_len,
    )


def _encode(
    message: pb.TokenizeRequest, tokenizer: Tokenizer, limits: RequestLimits, most: int | None
) -> list[int]:
    kind, chosen = message.WhichOneof("prompt"), message.HasField("add_special_tokens")
    if kind == "text":
        check_not_hopeless("text", len(message.text.encode()), tokenizer, limits, most)
        return tokenizer.encode(message.text, message.add_special_tokens or not chosen)
    if kind is None:
        raise InputError("prompt", "is missing: set text or chat")
    if chosen:
        raise InputError("add_special_tokens", "is for text: a chat has those of its template")
    return encode_chat(message.chat, tokenizer, limits, most)


def detokenize(
    message: pb.DetokenizeRequest, tokenizer: Tokenizer, limits: RequestLimits, most: int | None
) -> pb.DetokenizeResponse:
    tokens = parse_token_ids("token_ids", message.token_ids, limits)
    return pb.DetokenizeResponse(text=tokenizer.spell(tokens))
