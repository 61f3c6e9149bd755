"""From the wire to the engine: every field of a request is checked here, once."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.generation_config import NEUTRAL, SamplingDefaults
from ssd_engine.errors import InputError, too_long
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar
from ssd_engine.sampling.params import (
    MAX_BANNED_TOKENS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    check_sampling,
)
from ssd_engine.text.completion import Completion, StopRules
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from ssd_engine.text.tokenizer import Tokenizer
from ssd_serving.rpc.messages import check_tokens, decode_message, parse_grammar, parse_sampling
from ssd_target.front.chat_prompts import JSON, MAX_JSON_SYNTAX_BYTES, TOOLS, parse_chat
from ssd_target.records.engine_records import Submit
from ssd_target.records.speculation_options import SpeculationRequest

BYTES_OF_TOKEN = 16  # on average, at most: of texts that are worth a tokenizer's time
SPARE_BYTES = 1024  # beyond that: short texts may be of the longest tokens
MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_STRINGS = 128
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_BYTES = 8192  # all stop strings together
MAX_STOP_TOKEN_IDS = 1024
MAX_OPTIONS_BYTES = 1 << 20  # everything but texts and tokens: roles, stops, biases, names


@dataclass(frozen=True)
class RequestLimits:
    vocab_size: int
    max_model_len: int
    kv_tokens: int  # room for one sequence
    eos_token_ids: tuple[int, ...]
    synthetic: bool = False  # acceptance is made up
    sampling: SamplingDefaults = NEUTRAL
    grammars: GrammarCompiler | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be served as it is."""

    request_id: str
    prompt: list[int]
    generated: list[int]
    sampling: SamplingParams
    rules: StopRules
    num_logprobs: int | None
    completion: Completion  # after the generated tokens
    speculation: pb.SpeculationOptions  # as they came: settled where links can be dialled
    cache_salt: str = ""
    prompt_logprobs: int | None = None  # as num_logprobs, of the tokens of the prompt
    return_prompt: bool = False
    token_bytes: bool = False  # log probabilities name the bytes of their tokens

    def submit(
        self, sequence: int, speculation: SpeculationRequest, owner: str, shared: bool = False
    ) -> Submit:
        """``shared``: identities find what is cached of each other's prompts."""
        return Submit(
            sequence,
            pack_tokens(self.prompt),
            pack_tokens(self.generated),
            self.sampling,
            self.rules,
            self.num_logprobs,
            speculation,
            owner,
            f"{'' if shared else owner}\0{self.cache_salt}",
            self.prompt_logprobs,
        )


def largest_request(max_model_len: int) -> int:
    """Bytes of the longest message that can be served."""
    text, resumed = BYTES_OF_TOKEN * max_model_len + SPARE_BYTES, 4 * max_model_len
    return text + resumed + MAX_OPTIONS_BYTES


def parse_message(data: bytes) -> pb.GenerateRequest:
    return decode_message(pb.GenerateRequest, data)


def parse_request(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    most: int | None = None,
) -> ParsedRequest:
    """The caller may send ``most`` prompt tokens; None allows as many as fit."""
    if len(message.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InputError("request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes")
    if len(message.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InputError("cache_salt", f"at most {MAX_CACHE_SALT_BYTES} bytes")
    sampling = parse_sampling(message.sampling, limits.sampling.options())
    check_sampling(sampling, limits.vocab_size)
    grammar = parse_grammar(message.grammar)
    prompt = parse_prompt(message, tokenizer, limits, most)
    generated = parse_token_ids("generated_token_ids", message.generated_token_ids, limits)
    rules = parse_rules(message.stop, len(prompt), limits, message.output.special_tokens)
    table = tokenizer.spelled_bytes if rules.special_tokens else tokenizer.token_bytes
    completion = _resume(generated, rules, table)
    if grammar is not None:
        _check_grammar(grammar, generated, completion, message.stop, limits)
        sampling = replace(sampling, grammar=grammar)
    return ParsedRequest(
        request_id=message.request_id or secrets.token_hex(8),
        prompt=prompt,
        generated=generated,
        sampling=_without_stops(sampling, rules, len(prompt)),
        rules=rules,
        num_logprobs=parse_logprobs(message.logprobs, limits.synthetic),
        completion=completion,
        speculation=message.speculation,
        cache_salt=message.cache_salt,
        prompt_logprobs=_prompt_logprobs(message.logprobs, completion),
        return_prompt=message.return_prompt,
        token_bytes=message.logprobs.token_bytes,
    )


def parse_prompt(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    most: int | None = None,
) -> list[int]:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        check_not_hopeless("text", len(message.text.encode()), tokenizer, limits, most)
        prompt = tokenizer.encode(message.text) if message.text else []
    elif kind == "chat":
        prompt = encode_chat(message.chat, tokenizer, limits, most)
    elif kind == "token_ids":
        prompt = parse_token_ids("token_ids", message.token_ids, limits)
    else:
        raise InputError("prompt", "is missing: set text, chat or token_ids")
    if not prompt:
        raise InputError(kind, "is empty: a prompt needs at least one token")
    context = min(limits.max_model_len, limits.kv_tokens)
    if len(prompt) >= context:
        requested = f"{len(prompt)} tokens in the prompt alone; at most {context - 1} are possible"
        raise too_long(kind, context, requested)
    return prompt


def encode_chat(
    message: pb.ChatPrompt, tokenizer: Tokenizer, limits: RequestLimits, most: int | None
) -> list[int]:
    bound = _most_bytes(limits, most) + MAX_JSON_SYNTAX_BYTES
    for field, data in ((JSON, message.messages_json), (TOOLS, message.tools_json)):
        if (size := len(data)) > bound:
            about = f"{size} bytes, at most {bound} for the tokens that are allowed"
            raise _beyond(field, about, limits, most)
    chat = parse_chat(message)
    check_not_hopeless(chat.options.field, chat.num_text_bytes, tokenizer, limits, most)
    return tokenizer.encode_chat(chat.messages, chat.names, chat.options, chat.tools)


def check_not_hopeless(
    field: str, size: int, tokenizer: Tokenizer, limits: RequestLimits, most: int | None
) -> None:
    """Refuse without tokenising what cannot fit even in the longest tokens, or is far longer than
    texts of so many tokens are: a tokenizer takes a second, and much memory, for each megabyte."""
    least = tokenizer.fewest_tokens(size)
    if least >= limits.max_model_len:
        requested = f"{size} bytes, which are at least {least} tokens"
        raise too_long(field, limits.max_model_len, requested)
    if size > _most_bytes(limits, most):
        about = (
            f"{size} bytes, and {_most_tokens(limits, most)} tokens are allowed: of text at most "
            f"{BYTES_OF_TOKEN} bytes for each of these; longer tokens can be sent as token_ids"
        )
        raise _beyond(field, about, limits, most)


def _most_tokens(limits: RequestLimits, most: int | None) -> int:
    return min(limits.max_model_len - 1, limits.max_model_len if most is None else most)


def _beyond(field: str, about: str, limits: RequestLimits, most: int | None) -> InputError:
    """A text with more than the most tokens is too long for the context, unless a limit of the
    caller's is lower."""
    if _most_tokens(limits, most) < _most_tokens(limits, None):
        return InputError(field, about)
    return too_long(field, limits.max_model_len, about)


def _most_bytes(limits: RequestLimits, most: int | None) -> int:
    return BYTES_OF_TOKEN * _most_tokens(limits, most) + SPARE_BYTES


def parse_token_ids(field: str, data: bytes, limits: RequestLimits) -> list[int]:
    context = limits.max_model_len
    if (count := len(data) // 4) > context:
        raise too_long(field, context, f"{count} tokens")
    check_tokens(field, data, context, limits.vocab_size)
    return unpack_tokens(data)


def parse_rules(
    stop: pb.StopOptions, prompt_tokens: int, limits: RequestLimits, special_tokens: bool = False
) -> StopRules:
    """``special_tokens``: the text has control tokens spelled out."""
    context = min(limits.max_model_len, limits.kv_tokens)
    room = context - prompt_tokens
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else room
    if max_tokens > room:
        parts = f"{prompt_tokens} in the prompt, {max_tokens} by stop.max_tokens"
        requested = f"{prompt_tokens + max_tokens} tokens ({parts}, which may be {room} at most)"
        raise too_long("stop.max_tokens", context, requested)
    if max_tokens < 1:
        raise InputError("stop.max_tokens", f"must be in [1, {room}], got {max_tokens}")
    if len(stop.token_ids) > MAX_STOP_TOKEN_IDS:
        raise InputError(
            "stop.token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {len(stop.token_ids)}"
        )
    token_ids = set(stop.token_ids)
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise InputError(
            "stop.token_ids",
            f"token {max(token_ids)} is not in the vocabulary [0, {limits.vocab_size})",
        )
    if not stop.ignore_eos:
        token_ids |= set(limits.eos_token_ids)
    _check_min_tokens(stop.min_tokens, max_tokens, token_ids, limits)
    return StopRules(
        max_tokens,
        frozenset(token_ids),
        _stop_strings(stop.strings),
        stop.min_tokens,
        include_stop=stop.include_stop,
        special_tokens=special_tokens,
    )


def _check_min_tokens(
    min_tokens: int, max_tokens: int, token_ids: set[int], limits: RequestLimits
) -> None:
    if min_tokens > max_tokens:
        raise InputError(
            "stop.min_tokens", f"must be in [0, {max_tokens}] (stop.max_tokens), got {min_tokens}"
        )
    most = min(MAX_BANNED_TOKENS, limits.vocab_size - 1)
    if min_tokens and len(token_ids) > most:
        raise InputError(
            "stop.token_ids",
            f"with stop.min_tokens at most {most}, ends of sequence included, got {len(token_ids)}",
        )


def _without_stops(
    sampling: SamplingParams, rules: StopRules, prompt_tokens: int
) -> SamplingParams:
    """What stops is not drawn before there are min_tokens."""
    if not rules.min_tokens:
        return sampling
    banned = tuple(sorted(rules.token_ids))
    return replace(sampling, banned=banned, banned_until=prompt_tokens + rules.min_tokens)


def _stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise InputError("stop.strings", f"at most {MAX_STOP_STRINGS}, got {len(strings)}")
    for i, string in enumerate(strings):
        if not 1 <= len(string.encode()) <= MAX_STOP_STRING_BYTES:
            raise InputError(
                f"stop.strings[{i}]",
                f"must have 1 to {MAX_STOP_STRING_BYTES} bytes, has {len(string.encode())}",
            )
    total = sum(len(string.encode()) for string in strings)
    if total > MAX_STOP_BYTES:
        raise InputError("stop.strings", f"at most {MAX_STOP_BYTES} bytes in all, got {total}")
    return tuple(strings)


def parse_logprobs(options: pb.LogprobOptions, synthetic: bool = False) -> int | None:
    if options.top_n > MAX_TOP_LOGPROBS:
        raise InputError("logprobs.top_n", f"at most {MAX_TOP_LOGPROBS}, got {options.top_n}")
    is_asked = options.chosen or options.top_n > 0
    if options.token_bytes and not (is_asked or options.prompt):
        raise InputError("logprobs.token_bytes", "needs chosen, top_n or prompt beside it")
    if synthetic and (is_asked or options.prompt):
        raise InputError("logprobs", "are not there: this server makes acceptance up")
    return options.top_n if is_asked else None


def _prompt_logprobs(options: pb.LogprobOptions, completion: Completion) -> int | None:
    if not options.prompt:
        return None
    if completion.finish is not None:
        raise InputError(
            "logprobs.prompt",
            "generated_token_ids has ended the request, nothing is computed: leave it out",
        )
    return options.top_n


def _check_grammar(
    grammar: Grammar,
    generated: list[int],
    completion: Completion,
    stop: pb.StopOptions,
    limits: RequestLimits,
) -> None:
    """A grammar says where a text ends: nothing else may hold it open."""
    if stop.ignore_eos:
        raise InputError("stop.ignore_eos", "cannot be kept: a grammar says where the text ends")
    if stop.min_tokens:
        raise InputError("stop.min_tokens", "cannot be kept: a grammar says where the text ends")
    if limits.grammars is None:
        raise InputError("grammar", "is not served here: this server makes acceptance up")
    follower = limits.grammars.follow(grammar)
    ended = completion.finish is not None  # by its last token, which is no part of the text
    text = generated[:-1] if ended else generated
    if (fits := follower.num_allowed([], text)) < len(text):
        raise InputError("generated_token_ids", f"token {fits} does not follow the grammar")


def _resume(generated: list[int], rules: StopRules, token_bytes: Sequence[bytes]) -> Completion:
    """Only what this request could have emitted can be resumed."""
    completion = Completion(rules, token_bytes)
    for i, token in enumerate(generated):
        if completion.finish is not None:
            raise InputError(
                "generated_token_ids",
                f"goes on after token {i - 1}, where the request had ended",
            )
        completion.push(token)
    return completion
