"""POST /v1/chat/completions and /v1/completions."""

from starlette.requests import Request

from ssd_gateway.answers import Answer, AnswerResponse
from ssd_gateway.gateway import Gateway
from ssd_gateway.http.request_headers import request_id_of
from ssd_gateway.openai.choice import Choice
from ssd_gateway.openai.fields import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from ssd_gateway.openai.shapes import ChatShape, CompletionShape, Shape
from ssd_gateway.openai.translation import (
    TranslatedRequest,
    translate_chat,
    translate_completion,
)
from ssd_gateway.targets.generation import Generation


class GenerationRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> AnswerResponse:
        fields = await self._gateway.read(request, ChatRequest)
        request_id = request_id_of(request, fields.request_id)
        await self._gateway.learn(request, fields.model)
        form = self._gateway.chat_format(fields.model)
        translated = translate_chat(fields, request_id, form)
        return self._answer(request, fields, translated, ChatShape(), request_id)

    async def completion(self, request: Request) -> AnswerResponse:
        fields = await self._gateway.read(request, CompletionRequest)
        request_id = request_id_of(request, fields.request_id)
        await self._gateway.learn(request, fields.model)
        translated = translate_completion(fields, request_id)
        return self._answer(request, fields, translated, CompletionShape(), request_id)

    def _answer(
        self,
        request: Request,
        fields: GenerationFields,
        translated: TranslatedRequest,
        shape: Shape,
        request_id: str,
    ) -> AnswerResponse:
        gateway, config = self._gateway, self._gateway.config
        targets = gateway.targets_for(fields.model, translated.affinity)
        metadata_of = gateway.metadata_for(request)
        generations = [
            Generation(
                targets,
                each,
                metadata_of,
                gateway.stalls,
                config.stall_timeout,
                config.request_timeout,
            )
            for each in translated.requests
        ]
        choices = [
            Choice(index, translated.wanted, echo, translated.reading)
            for index, echo in enumerate(translated.echoes)
        ]
        info = targets[0].info
        model = fields.model or (info.name if info else "")
        stream = (fields.stream_options or StreamOptions()) if fields.stream else None
        return AnswerResponse(
            Answer(choices, generations, fields.n or 1),
            shape,
            model,
            stream,
            config.write_timeout,
            gateway.metrics,
            gateway.drain,
            request_id,
            translated.params,
        )
