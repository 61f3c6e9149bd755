"""The fields of requests, as JSON gives them: their types, and what cannot be honoured."""

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ssd_gateway.http.errors import ApiError, bad_request
from ssd_gateway.openai.nulls import without_nulls

MAX_CHOICES = 128
Probability = Annotated[float, Meta(ge=0, le=1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ReasoningEffort = Annotated[str, Meta(extra_json_schema={"enum": list(EFFORTS)})]

# Fields that are known, and that nothing here can honour, with the values that ask for nothing.
NOTHING: tuple[Any, ...] = (None, False, [], {})
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": NOTHING,
    "modalities": (None, ["text"]),
    "prediction": NOTHING,
    "store": NOTHING,
    "verbosity": (None, "medium"),
    "web_search_options": NOTHING,
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    "service_tier": (None, "auto", "default"),
    "suffix": (None, ""),
    "priority": (None, 0),
    "use_beam_search": NOTHING,
    "length_penalty": (None, 1),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": NOTHING,
    "bad_words": NOTHING,
    "prompt_logprobs": (None,),
    "logprob_token_ids": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "json_schema": NOTHING,
    "stop_regex": NOTHING,
    "no_stop_trim": NOTHING,
    "spaces_between_special_tokens": (None, True),
    "lora_path": NOTHING,
    "mm_processor_kwargs": NOTHING,
    "documents": NOTHING,
    "add_special_tokens": (None,),
    "rid": (None,),
    "input_ids": NOTHING,
    "return_meta_info": NOTHING,
    "return_spec_tokens_details": NOTHING,
}
# These change nothing that is generated: whoever asks may name them.
INFORMATIVE = ("user", "metadata", "safety_identifier")


Fields = TypeVar("Fields", bound=Struct)
Converted = TypeVar("Converted")


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SpeculationFields(Struct, forbid_unknown_fields=True):
    mode: str | None = None
    depth: Count | None = None
    verification: str | None = None
    endpoints: list[str] | None = None


class JsonSchemaFields(Struct, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # a text is held to its schema either way


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """One of them is to be there."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What chats and completions have in common. None: the default."""

    model: str | None = None
    n: Choices | None = None
    temperature: float | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None  # 64 bits, with a sign or without
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    speculative: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_token_origins: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None


class TokenizeFields(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


def read_fields(body: bytes, kind: type[Fields], allow_unknown: bool) -> Fields:
    """The request in ``body``; raises an ApiError that names what is wrong with it."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(None, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise bad_request(None, "the body must be a JSON object")
    given = without_nulls(given, kind)
    known = kind.__struct_encode_fields__
    for name in [name for name in given if name not in known]:
        _check_unknown(name, given.pop(name), kind, allow_unknown)
    return converted(given, kind)


def converted(given: Any, kind: type[Converted], place: str = "") -> Converted:
    """What is ``given`` at a place of a request, as a type; raises an ApiError that names where it
    is wrong."""
    try:
        return msgspec.convert(without_nulls(given, kind), kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), place) from None


@cache
def neutral_values(kind: type[Struct]) -> dict[str, tuple[Any, ...]]:
    """Fields that are known, and that a request of this kind cannot have, with the values that ask
    for nothing. Whoever names a field of chats in a completion means something by it, and the other
    way round."""
    kinds = (ChatRequest, CompletionRequest)
    elsewhere = [name for each in kinds for name in each.__struct_fields__ if kind in kinds]
    found = {**REFUSED, **dict.fromkeys(elsewhere, NOTHING)}
    return {name: values for name, values in found.items() if name not in kind.__struct_fields__}


def _check_unknown(name: str, value: Any, kind: type[Struct], allow_unknown: bool) -> None:
    neutral = neutral_values(kind).get(name)
    if neutral is not None:
        if not any(value is each or value == each for each in neutral):
            raise bad_request(name, "is not supported here; leave it out", "unsupported_parameter")
    elif not allow_unknown:
        raise bad_request(
            name,
            "is not known; leave it out, or ask for --allow-unknown-fields",
            "unknown_parameter",
        )


def _invalid(problem: str, root: str) -> ApiError:
    """msgspec says: Expected `int`, got `str` - at `$.n`; or: missing required field `prompt`."""
    what, _, place = problem.partition(" - at `$")
    param = (root + place.rstrip("`")).removeprefix(".")
    if what.startswith("Object missing required field"):
        return bad_request(_inner(param, what), "is missing", "missing_required_parameter")
    if what.startswith("Object contains unknown field"):
        return bad_request(_inner(param, what), "is not known; leave it out", "unknown_parameter")
    return bad_request(param or None, what[:1].lower() + what[1:], "invalid_type")


def _inner(param: str, what: str) -> str:
    """The field of ``param`` that msgspec names."""
    return f"{param}.{what.split('`')[1]}".removeprefix(".")
