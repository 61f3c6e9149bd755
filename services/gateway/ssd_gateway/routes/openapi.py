"""GET /openapi.json: the API, described from the types of its fields and answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ssd_gateway import __version__
from ssd_gateway.config import GatewayConfig
from ssd_gateway.http.errors import ErrorAnswer
from ssd_gateway.openai.answer_types import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizedTokens,
    ModelEntry,
    ModelList,
    TokenizedPrompt,
    Version,
)
from ssd_gateway.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeFields,
    TokenizeFields,
    neutral_values,
)
from ssd_gateway.routes.models import json_response
from ssd_gateway.routes.observation import LONGEST

EVENTS, JSON, PLAIN = "text/event-stream", "application/json", "text/plain"
ERRORS = {
    400: "A field is wrong, unknown, or not supported.",
    401: "No good key.",
    403: "A key without the role, or a page of a stranger.",
    404: "No such model, or no such target.",
    408: "The body is too slow.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Targets are full, or a key's limit is used up; Retry-After says when to come again.",
    500: "A fault of the service.",
    503: "No target takes requests; Retry-After says when to come again.",
    504: "The answer took too long.",
}
OF_KEYS = (401, 403)
OF_TARGETS = (*OF_KEYS, 404, 429, 500, 503, 504)
OF_BODIES = (400, 408, 413, 415)
KEY = "key"


@dataclass(frozen=True)
class ApiOperation:
    method: str
    path: str
    summary: str
    answer: Any = None  # its type, where it is JSON; None: nothing is told of it
    media: Sequence[str] = (JSON,)  # none: the body is empty
    body: type[Struct] | None = None
    query: Sequence[dict[str, Any]] = ()
    errors: Sequence[int] = ()
    is_open: bool = False  # it never needs a key

    @property
    def parameters(self) -> list[dict[str, Any]]:
        named = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", self.path)
        ]
        return [*named, *self.query]


def _query(name: str, about: str, required: bool = False, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": about, "required": required,
            "schema": schema}  # fmt: skip


def _posting(
    path: str, summary: str, body: type[Struct], answer: Any, media: Sequence[str] = (JSON,)
) -> ApiOperation:
    errors = (*OF_BODIES, *OF_TARGETS)
    return ApiOperation("post", path, summary, answer, media, body, errors=errors)


def _getting(path: str, summary: str, answer: Any = None, **more: Any) -> ApiOperation:
    return ApiOperation("get", path, summary, answer, **more)


TIMELINE = (
    _query("target", "HOST:PORT of the target, as answers name it.", True, type="string"),
    _query("sequence", "Its events alone; 0: all.", type="integer", minimum=0, default=0),
    _query("seconds", "So long ago.", type="number", minimum=0, maximum=LONGEST, default=30),
)
OPERATIONS = (
    _posting("/v1/chat/completions", "A chat's next message, whole or as events.",
             ChatRequest, ChatAnswer, (JSON, EVENTS)),
    _posting("/v1/completions", "Continuations of prompts, whole or as events.",
             CompletionRequest, CompletionAnswer, (JSON, EVENTS)),
    _posting("/tokenize", "Text or messages as tokens.", TokenizeFields, TokenizedPrompt),
    _posting("/detokenize", "Tokens as text.", DetokenizeFields, DetokenizedTokens),
    _getting("/v1/models", "Models that are served.", ModelList, errors=OF_TARGETS),
    _getting("/v1/models/{model}", "One of them.", ModelEntry, errors=OF_TARGETS),
    _getting("/health", "Whether the gateway lives.", media=(), is_open=True),
    _getting("/ready", "Whether a target takes requests.", media=(), is_open=True),
    _getting("/metrics", "Prometheus metrics.", media=(PLAIN,), errors=OF_KEYS),
    _getting("/version", "The gateway's version.", Version, is_open=True),
    _getting("/ssd/fleet", "Targets and their drafts.", errors=OF_KEYS),
    _getting("/ssd/timeline", "What targets and drafts did lately.", query=TIMELINE,
             errors=(400, *OF_KEYS, 404)),
)  # fmt: skip


def description(config: GatewayConfig | None = None) -> dict[str, Any]:
    config = config or GatewayConfig()
    schemas, components = _schemas()
    for each in OPERATIONS:
        if each.body is not None:
            _close(components[each.body.__name__], each.body, config.allow_unknown_fields)
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _described(each, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "SSD gateway", "version": __version__},
        "paths": paths,
        # Without keys of its own a gateway leaves it to targets whether they need any.
        "security": [{KEY: []}] if config.token_file else [{KEY: []}, {}],
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status, schemas) for status in ERRORS},
            "securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    """Schemas by type, and what they refer to."""
    kinds: list[Any] = [each.body for each in OPERATIONS if each.body is not None]
    kinds += [each.answer for each in OPERATIONS if each.answer is not None]
    kinds.append(ErrorAnswer)
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    return dict(zip(kinds, schemas, strict=True)), components


def _close(schema: dict[str, Any], kind: type[Struct], allow_unknown: bool) -> None:
    """Fields that cannot be honoured may be there if they ask for nothing."""
    for name, values in neutral_values(kind).items():
        schema["properties"].setdefault(name, {"enum": list(values)})
    if not allow_unknown:
        schema["additionalProperties"] = False


def _described(each: ApiOperation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content = {media: {"schema": _media_schema(each, media, schemas)} for media in each.media}
    answer: dict[str, Any] = {"description": each.summary}
    responses = {"200": {**answer, "content": content} if content else answer}
    responses |= {
        str(status): {"$ref": f"#/components/responses/{status}"} for status in each.errors
    }
    if each.path == "/ready":
        responses["503"] = {"description": "None does, or the gateway leaves."}
    described: dict[str, Any] = {"summary": each.summary, "responses": responses}
    if each.parameters:
        described["parameters"] = each.parameters
    if each.body is not None:
        posted = {JSON: {"schema": schemas[each.body]}}
        described["requestBody"] = {"required": True, "content": posted}
    if each.is_open:
        described["security"] = []
    return described


def _media_schema(each: ApiOperation, media: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    if media != JSON:
        return {"type": "string"}
    return {"type": "object"} if each.answer is None else dict(schemas[each.answer])


def _error(status: int, schemas: dict[Any, Any]) -> dict[str, Any]:
    content = {JSON: {"schema": schemas[ErrorAnswer]}}
    return {"description": ERRORS[status], "content": content}


class OpenApiRoutes:
    def __init__(self, config: GatewayConfig) -> None:
        self._content = description(config)

    async def describe(self, request: Request) -> Response:
        return json_response(self._content)
