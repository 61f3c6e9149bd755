"""From what a user asked for to a GenerateRequest. Pure: no input, no output.

Only what was set goes on the wire; for the rest the server's defaults hold.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd.v1 import target_pb2
from ssd_client.errors import BadInputError
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.speculation import MODES, VERIFICATIONS


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class ChatPrompt:
    """Messages as (role, content)."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt
Asked = str | Sequence[int] | Prompt  # a text, token ids, or a prompt
Message = Mapping[str, str] | tuple[str, str]  # {"role": .., "content": ..}, or (role, content)
Messages = str | Sequence[Message]  # a text: one message of a user

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Options that are sent as they are: those with one value by the part of the request that they are
# in, and lists with the field that they fill there.
_VALUES = {
    "sampling": (*SAMPLING, "seed"),
    "stop": ("max_tokens", "min_tokens"),
    "speculation": ("depth", "down_weight"),
}
_LISTS = {
    "stop": ("stop", "strings"),
    "stop_token_id": ("stop", "token_ids"),
    "draft": ("speculation", "endpoints"),
}
# Options that say what a text must be, and the fields that they fill.
GRAMMARS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "context_free",
}
_CHOICES: dict[str, Mapping[str, Any]] = {"mode": MODES, "verification": VERIFICATIONS}


def prompt_of(asked: Asked) -> Prompt:
    if isinstance(asked, str):
        return TextPrompt(asked)
    if isinstance(asked, TextPrompt | ChatPrompt | TokenPrompt):
        return asked
    return TokenPrompt(tuple(asked))


def chat_of(messages: Messages) -> ChatPrompt:
    if isinstance(messages, str):
        return ChatPrompt((("user", messages),))
    return ChatPrompt(tuple(map(_message, messages)))


def _message(message: Message) -> tuple[str, str]:
    if isinstance(message, tuple):
        return message
    try:
        return message["role"], message["content"]
    except KeyError as missing:
        raise BadInputError(f"messages: {missing.args[0]!r} is missing in {message!r}") from None


def build_request(prompt: Prompt, options: RequestOptions) -> target_pb2.GenerateRequest:
    """Raises BadInputError where a value cannot be sent; the server judges the rest."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise BadInputError(f"{', '.join(sorted(unknown))}: no such option")
    request = target_pb2.GenerateRequest(
        request_id=options.get("request_id") or "", cache_salt=options.get("cache_salt") or ""
    )
    _set_prompt(request, prompt, options.get("chat_template_kwargs"))
    _set_values(request, options)
    _set_lists(request, options)
    _set_grammar(request.grammar, options)
    if options.get("ignore_eos"):
        request.stop.ignore_eos = True
    top_logprobs = options.get("top_logprobs")
    if options.get("logprobs") or top_logprobs:
        request.logprobs.chosen = True
        with _named("top_logprobs"):
            request.logprobs.top_n = top_logprobs or 0
    return request


def resume_request(
    request: target_pb2.GenerateRequest, seed: int, token_ids: Iterable[int]
) -> target_pb2.GenerateRequest:
    """The same request, to go on after `token_ids`, which were received under `seed`. What is said
    of the prompt came before them, and is not asked for again."""
    resumed, received = target_pb2.GenerateRequest(), pack_token_ids(token_ids)
    resumed.CopyFrom(request)
    resumed.sampling.seed = seed
    resumed.generated_token_ids += received
    if received:
        resumed.return_prompt = False
        if resumed.logprobs.prompt:
            resumed.logprobs.prompt = False
    return resumed


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    ids = tuple(token_ids)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        wrong = next(each for each in ids if not _is_token_id(each))
        raise BadInputError(f"token_ids: {wrong!r} is no token id") from None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**32


def _set_prompt(
    request: target_pb2.GenerateRequest, prompt: Prompt, template_kwargs: Mapping[str, Any] | None
) -> None:
    match prompt:
        case TextPrompt(text):
            request.text = text
        case ChatPrompt(messages):
            request.chat.SetInParent()
            for role, content in messages:
                request.chat.messages.add(role=role, content=content)
        case TokenPrompt(token_ids):
            request.token_ids = pack_token_ids(token_ids)
    if template_kwargs is not None:
        if not isinstance(prompt, ChatPrompt):
            raise BadInputError("--chat-template-kwargs needs --chat")
        request.chat.template_kwargs.update(template_kwargs)


def _set_values(request: target_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    for part, names in _VALUES.items():
        for name in names:
            if options.get(name) is not None:
                with _named(name):
                    setattr(getattr(request, part), name, options[name])
    for name, values in _CHOICES.items():
        value = options.get(name)
        if value is not None:
            if value not in values:
                raise BadInputError(f"{name}: one of {', '.join(values)} is needed, got {value!r}")
            setattr(request.speculation, name, values[value])


def _set_lists(request: target_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    """Touching an empty part would not put it on the wire; extending it would."""
    if isinstance(options.get("stop"), str):
        raise BadInputError(f"stop: a list of texts is needed, such as [{options['stop']!r}]")
    for name, (part, field) in _LISTS.items():
        if options.get(name):
            with _named(name):
                getattr(getattr(request, part), field).extend(options[name])
    with _named("logit_bias"):
        request.sampling.logit_bias.update(options.get("logit_bias", {}))


def _set_grammar(grammar: target_pb2.Grammar, options: Mapping[str, Any]) -> None:
    given = [name for name in GRAMMARS if options.get(name)]
    if len(given) > 1:
        raise BadInputError(f"{' and '.join(given)}: a text follows one of them alone")
    for name in given:
        value = options[name]
        with _named(name):
            if name == "choice":
                grammar.choices.texts.extend(value)
            elif name == "json_schema" and not isinstance(value, str):
                grammar.json_schema = json.dumps(value)
            else:
                setattr(grammar, GRAMMARS[name], value)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What a message cannot hold is the caller's, and is called by its name."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInputError(f"{name}: {error}") from None
