"""From a body to what targets are asked. Pure, so that another process can do it as well."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ssd.v1 import target_pb2 as pb
from ssd_gateway.http.errors import ApiError, bad_request, too_large
from ssd_gateway.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeFields,
    GenerationFields,
    StreamOptions,
    TokenizeFields,
    read_fields,
)
from ssd_gateway.openai.params import Params, detokenize_params, tokenize_params
from ssd_gateway.openai.translation import (
    TranslatedRequest,
    chat_prompt,
    pack,
    translate_chat,
    translate_completion,
)

MAX_ALL_BYTES = 16 << 20  # of a body's requests together, unless it has half as many itself


@dataclass(frozen=True)
class Terms:
    """What a body is read by, beside its own fields."""

    request_id: str = "id"  # of a request whose body has none
    forms: Mapping[str | None, pb.ChatFormat] | None = None  # by model; None: where none is named
    most: int | None = None  # bytes that the largest target takes in one message
    allow_unknown: bool = False

    def form_of(self, model: str | None) -> pb.ChatFormat:
        forms = self.forms or {}
        return forms.get(model) or forms.get(None) or pb.ChatFormat()


Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Prepared(Generic[Asked]):
    """``problem``: why nothing can be asked, unless nobody serves the model anyway."""

    model: str | None
    request_id: str | None = None  # the body's own
    asked: Asked | None = None
    problem: ApiError | None = None


Prepare = Callable[[bytes, Terms], Prepared[Asked]]


@dataclass(frozen=True)
class PreparedGeneration:
    translated: TranslatedRequest
    choices: int  # of each prompt
    stream: StreamOptions | None  # None: in one piece


@dataclass(frozen=True)
class PreparedCall:
    """A call that has one answer."""

    message: Any
    params: Params
    token_strs: bool = False


def prepare_chat(body: bytes, terms: Terms) -> Prepared[PreparedGeneration]:
    fields = read_fields(body, ChatRequest, terms.allow_unknown)
    form = terms.form_of(fields.model)
    translate = lambda: translate_chat(fields, terms.request_id, form)  # noqa: E731
    return _generation(fields, translate, len(body), terms)


def prepare_completion(body: bytes, terms: Terms) -> Prepared[PreparedGeneration]:
    fields = read_fields(body, CompletionRequest, terms.allow_unknown)
    translate = lambda: translate_completion(fields, terms.request_id)  # noqa: E731
    return _generation(fields, translate, len(body), terms)


def _generation(
    fields: GenerationFields,
    translate: Callable[[], TranslatedRequest],
    size: int,
    terms: Terms,
) -> Prepared[PreparedGeneration]:
    try:
        translated = translate()
        _check_sizes(translated, max(MAX_ALL_BYTES, 2 * size), terms.most)
    except ApiError as error:
        return Prepared(fields.model, fields.request_id, problem=error)
    stream = (fields.stream_options or StreamOptions()) if fields.stream else None
    asked = PreparedGeneration(translated, fields.n or 1, stream)
    return Prepared(fields.model, fields.request_id, asked)


def _check_sizes(translated: TranslatedRequest, most_of_all: int, most: int | None) -> None:
    """A target would refuse the message; and choices multiply what their prompt takes."""
    sizes = [each.ByteSize() for each in translated.requests]
    if most is not None and max(sizes) > most:
        raise too_large(max(sizes), most, translated.params.get("request"))
    if sum(sizes) > most_of_all:
        about = f"{len(sizes)} choices of {max(sizes)} bytes are more than {most_of_all} together"
        raise ApiError(413, f"n: {about}; ask for fewer", param="n", code="request_too_large")


def prepare_tokenize(body: bytes, terms: Terms) -> Prepared[PreparedCall]:
    fields = read_fields(body, TokenizeFields, terms.allow_unknown)
    try:
        message = _tokenize(fields)
        asked = _call(message, tokenize_params(fields), terms, bool(fields.return_token_strs))
    except ApiError as error:
        return Prepared(fields.model, problem=error)
    return Prepared(fields.model, asked=asked)


def _tokenize(fields: TokenizeFields) -> pb.TokenizeRequest:
    message = pb.TokenizeRequest()
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("prompt", "either prompt or messages is needed")
    if fields.prompt is not None:
        message.text = fields.prompt
    else:
        message.chat.CopyFrom(chat_prompt(fields))
    if fields.add_special_tokens is not None:
        message.add_special_tokens = fields.add_special_tokens
    return message


def prepare_detokenize(body: bytes, terms: Terms) -> Prepared[PreparedCall]:
    fields = read_fields(body, DetokenizeFields, terms.allow_unknown)
    try:
        message = pb.DetokenizeRequest(token_ids=pack(fields.tokens))
        asked = _call(message, detokenize_params(), terms)
    except ApiError as error:
        return Prepared(fields.model, problem=error)
    return Prepared(fields.model, asked=asked)


def _call(message: Any, params: Params, terms: Terms, token_strs: bool = False) -> PreparedCall:
    if terms.most is not None and message.ByteSize() > terms.most:
        raise too_large(message.ByteSize(), terms.most, params.get("request"))
    return PreparedCall(message, params, token_strs)
