"""From the wire to plain data: what the messages of every service have in common.

Messages are taken as they come; the engine knows none of their types.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ssd_engine.errors import TOO_LONG, InputError
from ssd_engine.grammar.spec import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from ssd_engine.sampling.params import OPTION_NAMES, SamplingParams, check_bias_size

LENGTH_DELIMITED = 2  # the wire type of strings, bytes and messages
Kind = TypeVar("Kind", bound=Message)


def decode_message(kind: type[Kind], data: bytes) -> Kind:
    try:
        return kind.FromString(data)
    except DecodeError:
        reason = f"is not a {kind.DESCRIPTOR.name} message, or a string in it is not UTF-8"
        raise InputError("request", reason) from None


def is_newer(message: Message) -> bool:
    """Whether a message whose oneof is not set says something that only a newer version knows."""
    fields: Any = UnknownFieldSet(message)
    return any(field.wire_type == LENGTH_DELIMITED for field in fields)


def parse_sampling(options: Any, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The options of a message. What is absent takes the default, neutral where there is none; a
    missing seed is 64 bits from the system."""
    check_bias_size(len(options.logit_bias))
    given = dict(defaults or {})
    given |= {name: getattr(options, name) for name in OPTION_NAMES if options.HasField(name)}
    return SamplingParams(
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        logit_bias=tuple(sorted(options.logit_bias.items())),
        **given,
    )


def parse_grammar(message: Any, field: str = "grammar") -> Grammar | None:
    """The grammar of a message, which is compiled elsewhere."""
    rule = message.WhichOneof("rule")
    if rule is None:
        if message.ByteSize() or is_newer(message):
            raise InputError(field, "names no rule that is known here")
        return None
    value = getattr(message, rule)
    source = json.dumps(list(value.texts)) if rule == "choices" else value
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InputError(f"{field}.{rule}", f"{size} bytes, at most {MAX_GRAMMAR_BYTES}")
    return Grammar(GrammarKind[rule.upper()], source)


def write_grammar(grammar: Grammar) -> dict[str, Any]:
    """The fields of its message."""
    rule = grammar.kind.name.lower()
    choices = grammar.kind is GrammarKind.CHOICES
    return {rule: {"texts": json.loads(grammar.source)} if choices else grammar.source}


def check_tokens(field: str, data: bytes, max_tokens: int, vocab_size: int) -> int:
    """Token ids, 4 bytes little-endian each; returns how many."""
    if len(data) % 4:
        raise InputError(field, f"{len(data)} bytes are not a multiple of 4 (little-endian uint32)")
    if len(data) // 4 > max_tokens:
        problem = f"{len(data) // 4} tokens are beyond the context of {max_tokens}"
        raise InputError(field, problem, TOO_LONG)
    tokens = np.frombuffer(data, dtype="<u4")
    outside = np.flatnonzero(tokens >= vocab_size)
    if len(outside):
        raise not_in_vocabulary(f"{field}[{outside[0]}]", int(tokens[outside[0]]), vocab_size)
    return len(tokens)


def not_in_vocabulary(field: str, token: int, vocab_size: int) -> InputError:
    return InputError(field, f"token {token} is not in the vocabulary [0, {vocab_size})")
