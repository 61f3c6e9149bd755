"""From OpenAI's fields to requests of the targets' contract. Pure: no input, no output."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import randbits
from typing import Any

import msgspec
from google.protobuf import json_format, struct_pb2

from ssd.v1 import target_pb2 as pb
from ssd_client.generate.speculation import MODES, VERIFICATIONS
from ssd_gateway.chat_formats.chat_reading import ChatReading
from ssd_gateway.http.errors import bad_request
from ssd_gateway.openai.fields import (
    EFFORTS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    SpeculationFields,
)
from ssd_gateway.openai.messages import messages_for_template
from ssd_gateway.openai.params import chat_params, completion_params
from ssd_gateway.openai.reading import reading_of
from ssd_gateway.openai.structured_output import NamedGrammar, grammar_of
from ssd_gateway.openai.tools import check_tools, tool_use, tools_for_template

COMPLETION_TOKENS = 16  # of /v1/completions, where max_tokens is not said
MAX_PROMPTS = 128
MAX_ALL_CHOICES = 256
MAX_KWARGS_LEVELS = 24  # a message of protobuf has 100, three for an object
SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
MASK = 2**64 - 1
BEGINNING_BYTES = 256  # fewer are not worth a cache, and more would tell questions apart


@dataclass(frozen=True)
class Wanted:
    """How the answer is to look, beyond its text."""

    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    origins: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    no_output: bool = False  # the prompt alone is echoed
    stop_token_ids: frozenset[int] = frozenset()  # that the caller has named


@dataclass(frozen=True)
class TranslatedRequest:
    requests: list[pb.GenerateRequest]  # one for each choice
    wanted: Wanted
    affinity: bytes  # requests of the same beginning go to the same target
    echoes: list[str | None]  # what to echo for each choice; None: as the target says
    reading: ChatReading | None = None  # of a chat
    params: Mapping[str, str] = field(default_factory=dict)  # fields by the targets' names


def seed_of_choice(seed: int, index: int) -> int:
    """The first choice has the request's own seed: it is the text of n = 1."""
    if index == 0:
        return seed & MASK
    digest = blake2b(struct.pack("<QQ", seed & MASK, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def translate_chat(
    fields: ChatRequest, request_id: str, form: pb.ChatFormat | None = None
) -> TranslatedRequest:
    """``form``: how the model writes what is more than text; None: that is not known."""
    form = form or pb.ChatFormat()
    base = _base(fields, request_id)
    if (most := _most_tokens(fields)) is not None:
        base.stop.max_tokens = most
    base.chat.CopyFrom(chat_prompt(fields))
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs", "needs logprobs: true")
    wanted = Wanted(
        logprobs=bool(fields.logprobs),
        top_logprobs=fields.top_logprobs or 0,
        token_ids=bool(fields.return_token_ids),
        origins=bool(fields.return_token_origins),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
    )
    _ask(base, wanted)
    use, own = tool_use(fields, form.tools), grammar_of(fields)
    reading = reading_of(fields, form, use, own)
    if use is not None:
        grammar = use.grammar(reading.thinking, own)
    else:
        grammar = None if own is None else own.after_thoughts(reading.thinking)
    if grammar is not None:
        base.grammar.CopyFrom(grammar.grammar)
    base.return_prompt |= reading.by_prompt
    choices = _choices(base, fields)
    return TranslatedRequest(
        choices,
        wanted,
        _affinity(fields, base),
        [None] * len(choices),
        reading,
        {**chat_params(fields), **_params_of(grammar)},
    )


def _most_tokens(fields: ChatRequest) -> int | None:
    """By either name, as long as they agree."""
    names = ("max_completion_tokens", "max_tokens")
    given = {name: most for name in names if (most := getattr(fields, name)) is not None}
    for name, most in given.items():
        _at_least_one(name, most)
    if len(set(given.values())) > 1:
        problem = (
            f"{fields.max_tokens} is not max_completion_tokens, {fields.max_completion_tokens}"
        )
        raise bad_request("max_tokens", f"{problem}: leave one of them out")
    return next(iter(given.values()), None)


def chat_prompt(fields: Any) -> pb.ChatPrompt:
    """``fields``: a request with messages, and how the template is to render them."""
    chat = pb.ChatPrompt(
        messages_json=msgspec.json.encode(messages_for_template(fields.messages)),
        continue_final_message=bool(fields.continue_final_message),
    )
    if check_tools(fields.tools) and getattr(fields, "tool_choice", None) != "none":
        chat.tools_json = msgspec.json.encode(tools_for_template(fields.tools))
    if fields.add_generation_prompt is not None:
        chat.add_generation_prompt = fields.add_generation_prompt
    kwargs = dict(fields.chat_template_kwargs or {})
    if (effort := getattr(fields, "reasoning_effort", None)) is not None:
        kwargs["reasoning_effort"] = _effort(effort)
    if kwargs:
        chat.template_kwargs.CopyFrom(_struct(kwargs))
    return chat


def _effort(name: str) -> str:
    if name not in EFFORTS:
        problem = f"must be one of {', '.join(EFFORTS)}, got {name[:64]!r}"
        hint = "a template's own go into chat_template_kwargs"
        raise bad_request("reasoning_effort", f"{problem}; {hint}")
    return name


def _struct(value: dict[str, Any]) -> struct_pb2.Struct:
    if _levels(value) > MAX_KWARGS_LEVELS:
        raise bad_request("chat_template_kwargs", f"at most {MAX_KWARGS_LEVELS} levels")
    try:
        return json_format.ParseDict(value, struct_pb2.Struct())
    except (json_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise bad_request("chat_template_kwargs", str(error)) from None


def _levels(value: Any) -> int:
    """How deeply a value is nested, as far as it matters."""
    levels, inside = 0, [value]
    while inside and levels <= MAX_KWARGS_LEVELS:
        levels, lists = levels + 1, [each for each in inside if isinstance(each, list | dict)]
        inside = [v for each in lists for v in (each.values() if isinstance(each, dict) else each)]
    return levels


def translate_completion(fields: CompletionRequest, request_id: str) -> TranslatedRequest:
    prompts = _prompts(fields.prompt)
    n, echo = fields.n or 1, bool(fields.echo)
    if fields.best_of not in (None, n):
        raise bad_request("best_of", f"must be n, {n}, or left out: nothing is ranked here")
    if len(prompts) * n > MAX_ALL_CHOICES:
        raise bad_request(
            "n", f"{len(prompts)} prompts of {n} choices are more than {MAX_ALL_CHOICES}"
        )
    most = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if not most and not echo:
        raise bad_request("max_tokens", "must be at least 1, unless echo is true")
    base = _base(fields, request_id)
    base.stop.max_tokens = most or 1
    wanted = Wanted(
        logprobs=fields.logprobs is not None,
        top_logprobs=fields.logprobs or 0,
        token_ids=bool(fields.return_token_ids),
        origins=bool(fields.return_token_origins),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        echo=echo,
        no_output=not most,
    )
    _ask(base, wanted)
    if (grammar := grammar_of(fields)) is not None:
        base.grammar.CopyFrom(grammar.grammar)
    requests, echoes = [], []
    for prompt in prompts:
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = pack(prompt)
        requests += _choices(request, fields)
        echoes += [prompt if isinstance(prompt, str) else None] * n
    params = {**completion_params(fields), **_params_of(grammar)}
    affinity = _affinity(fields, requests[0])
    return TranslatedRequest(requests, wanted, affinity, echoes, params=params)


def _params_of(grammar: NamedGrammar | None) -> dict[str, str]:
    return {} if grammar is None else {"grammar": grammar.param, **grammar.params}


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if len(kinds) != 1:
        raise bad_request("prompt", "must be a text, texts, token ids or lists of token ids")
    prompts = [prompt] if kinds == {int} else prompt
    if len(prompts) > MAX_PROMPTS:
        raise bad_request("prompt", f"at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _base(fields: GenerationFields, request_id: str) -> pb.GenerateRequest:
    """Everything but the prompt, how long the output is, and what is told of it."""
    _check_stream_options(fields)
    request = pb.GenerateRequest(
        request_id=fields.request_id or request_id, cache_salt=fields.cache_salt or ""
    )
    for name in SAMPLING:
        if (value := getattr(fields, name)) is not None:
            setattr(request.sampling, name, value)
    if fields.top_k is not None:
        request.sampling.top_k = max(0, fields.top_k)
    for token, bias in (fields.logit_bias or {}).items():
        request.sampling.logit_bias[_token("logit_bias", token)] = bias
    stop = request.stop
    stop.strings.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop or [])
    stop.token_ids.extend(fields.stop_token_ids or [])
    stop.ignore_eos = bool(fields.ignore_eos)
    stop.min_tokens = fields.min_tokens or 0
    stop.include_stop = bool(fields.include_stop_str_in_output)
    request.output.special_tokens = fields.skip_special_tokens is False
    _speculation(request.speculation, fields)
    return request


def _check_stream_options(fields: GenerationFields) -> None:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise bad_request("stream_options", "needs stream: true")
    if options is not None and options.include_obfuscation:
        raise bad_request(
            "stream_options.include_obfuscation",
            "is not supported here; leave it out",
            "unsupported_parameter",
        )


def _speculation(options: pb.SpeculationOptions, fields: GenerationFields) -> None:
    if fields.speculative is False:
        options.mode = pb.SPECULATION_MODE_OFF
    given = fields.speculation
    if given is None:
        return
    _check_speculation(given, fields.speculative)
    if given.mode is not None and given.mode != "auto":
        options.mode = _named("speculation.mode", given.mode, MODES)
    if given.verification is not None:
        options.verification = _named("speculation.verification", given.verification, VERIFICATIONS)
    options.depth = given.depth or 0
    options.endpoints.extend(given.endpoints or [])


def _check_speculation(given: SpeculationFields, speculative: bool | None) -> None:
    if given.mode is not None and speculative is not None and speculative == (given.mode == "off"):
        raise bad_request(
            "speculative",
            f"{str(speculative).lower()} cannot be together with speculation.mode "
            f"{given.mode!r}: leave one of them out",
        )
    if given.depth == 0:
        raise bad_request(
            "speculation.depth",
            'must be at least 1; "mode": "off" is without speculation, and without a depth it is '
            "the server's own",
        )


def _named(param: str, name: str, known: Any) -> Any:
    if name not in known:
        raise bad_request(param, f"must be one of {', '.join(known)}, got {name[:64]!r}")
    return known[name]


def _ask(request: pb.GenerateRequest, wanted: Wanted) -> None:
    """What the target has to say for the answer to look so."""
    request.return_prompt = wanted.echo or wanted.token_ids
    if wanted.logprobs:
        options = request.logprobs
        options.chosen, options.top_n = True, wanted.top_logprobs
        options.token_bytes, options.prompt = True, wanted.echo


def _choices(request: pb.GenerateRequest, fields: GenerationFields) -> list[pb.GenerateRequest]:
    """The request once for each of its choices, each with a seed of its own."""
    # 53 bits: the seed that is told survives JSON in every language.
    seed = randbits(53) if fields.seed is None else fields.seed
    if not -(2**63) <= seed < 2**64:
        raise bad_request("seed", "must have 64 bits at most")
    choices = []
    for index in range(fields.n or 1):
        choice = pb.GenerateRequest()
        choice.CopyFrom(request)
        choice.sampling.seed = seed_of_choice(seed, index)
        choices.append(choice)
    return choices


def _affinity(fields: GenerationFields, request: pb.GenerateRequest) -> bytes:
    """What the beginning of a text is told by: a key of the caller's own, else its first bytes.

    So few of them are those of a long system prompt, whatever is asked after it. A chat's end with
    the first message of its user: later turns begin as the first one did.
    """
    own = fields.prompt_cache_key or fields.session_id
    if own is not None:
        return own.encode()
    if isinstance(fields, ChatRequest):
        first = next((i for i, m in enumerate(fields.messages) if m.get("role") == "user"), 0)
        return msgspec.json.encode(fields.messages[: first + 1])[:BEGINNING_BYTES]
    return (request.text.encode() or request.token_ids)[:BEGINNING_BYTES]


def _at_least_one(param: str, value: int) -> int:
    if value < 1:
        raise bad_request(param, f"must be at least 1, got {value}")
    return value


def _token(param: str, text: str) -> int:
    try:
        token = int(text)
    except ValueError:
        token = -1
    if not 0 <= token < 2**32:
        raise bad_request(param, f"{text[:64]!r} is no token id")
    return token


def pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))
