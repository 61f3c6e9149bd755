"""GET /v1/models, POST /tokenize and /detokenize: what is served, and its tokenizer."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ssd.v1 import target_pb2 as pb
from ssd_client.errors import ClientError
from ssd_client.generate.speculation import mode_name
from ssd_gateway.gateway import Gateway
from ssd_gateway.http.errors import ApiError, api_error
from ssd_gateway.openai.answer_types import ModelEntry, TokenizedPrompt
from ssd_gateway.openai.translation import unpack
from ssd_gateway.reading.prepared import (
    Prepare,
    PreparedCall,
    prepare_detokenize,
    prepare_tokenize,
)

TOKENIZE_SECONDS = 30.0


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class ModelRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        self._gateway.keys.check(request)
        return json_response({"object": "list", "data": await self._models(request)})

    async def model(self, request: Request) -> Response:
        self._gateway.keys.check(request)
        wanted = request.path_params["model"]
        for each in await self._models(request):
            if each["id"] == wanted:
                return json_response(each)
        raise ApiError(
            404, f"model: {wanted!r} is not served here", param="model", code="model_not_found"
        )

    async def _models(self, request: Request) -> list[ModelEntry]:
        found = {each.name: self._entry(each) for each in await self._gateway.infos(request)}
        return [found[name] for name in sorted(found)]

    def _entry(self, info: pb.GetModelInfoResponse) -> ModelEntry:
        return {
            "id": info.name,
            "object": "model",
            "created": self._created,
            "owned_by": "ssd",
            "root": info.name,
            "parent": None,
            "max_model_len": info.max_model_len,
            "has_chat_template": info.has_chat_template,
            "speculation_modes": [mode_name(mode) for mode in info.speculation_modes],
        }

    async def tokenize(self, request: Request) -> Response:
        asked, answer = await self._ask(request, prepare_tokenize, "Tokenize")
        content: TokenizedPrompt = {
            "count": len(answer.tokens),
            "max_model_len": answer.max_model_len,
            "tokens": unpack(answer.token_ids),
        }
        if asked.token_strs:
            content["token_strs"] = [each.decode("utf-8", "replace") for each in answer.tokens]
        return json_response(content)

    async def detokenize(self, request: Request) -> Response:
        _, answer = await self._ask(request, prepare_detokenize, "Detokenize")
        return json_response({"prompt": answer.text})

    async def _ask(
        self, request: Request, how: Prepare[PreparedCall], method: str
    ) -> tuple[PreparedCall, Any]:
        model, asked = await self._gateway.prepare(request, how)
        target = self._gateway.targets_for(model)[0]
        call = getattr(target.stub, method)
        metadata = self._gateway.metadata_for(request)(target)
        try:
            return asked, await target.ask(call, asked.message, metadata, TOKENIZE_SECONDS)
        except ClientError as error:
            raise api_error(error, asked.params) from error
