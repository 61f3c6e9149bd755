"""GET /openapi.json: the API, described from the fields' own types."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ssd_gateway import __version__
from ssd_gateway.openai.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeFields,
    TokenizeFields,
)
from ssd_gateway.routes.models import json_response

POSTED = {
    "/v1/chat/completions": (ChatRequest, "A chat's next message, whole or as events."),
    "/v1/completions": (CompletionRequest, "Continuations of prompts, whole or as events."),
    "/tokenize": (TokenizeFields, "Text or messages as tokens."),
    "/detokenize": (DetokenizeFields, "Tokens as text."),
}
READ = {
    "/v1/models": "Models that are served.",
    "/v1/models/{model}": "One of them.",
    "/health": "Whether the gateway lives.",
    "/ready": "Whether a target takes requests.",
    "/metrics": "Prometheus metrics.",
    "/version": "The gateway's version.",
    "/ssd/fleet": "Targets and their drafts.",
    "/ssd/timeline": "What targets and drafts did lately.",
}


def description() -> dict[str, Any]:
    kinds = [kind for kind, _ in POSTED.values()]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(POSTED.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {**_operation(text), "requestBody": body}}
    for path, text in READ.items():
        paths[path] = {"get": _operation(text)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "SSD gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(text: str) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": {"description": text}}}


class OpenApiRoutes:
    def __init__(self) -> None:
        self._content = description()

    async def describe(self, request: Request) -> Response:
        return json_response(self._content)
