"""POST /v1/chat/completions and /v1/completions."""

from starlette.requests import Request

from ssd_gateway.answers import Answer, AnswerResponse
from ssd_gateway.gateway import Gateway
from ssd_gateway.http.request_headers import request_id_of
from ssd_gateway.openai.choice import Choice
from ssd_gateway.openai.shapes import ChatShape, CompletionShape, Shape
from ssd_gateway.reading.prepared import (
    Prepare,
    PreparedGeneration,
    prepare_chat,
    prepare_completion,
)
from ssd_gateway.targets.generation import Generation


class GenerationRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, request: Request) -> AnswerResponse:
        return await self._answer(request, prepare_chat, ChatShape())

    async def completion(self, request: Request) -> AnswerResponse:
        return await self._answer(request, prepare_completion, CompletionShape())

    async def _answer(
        self, request: Request, how: Prepare[PreparedGeneration], shape: Shape
    ) -> AnswerResponse:
        gateway, config = self._gateway, self._gateway.config
        model, asked = await gateway.prepare(request, how)
        translated = asked.translated
        targets = gateway.targets_for(model, translated.affinity)
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
        return AnswerResponse(
            Answer(choices, generations, asked.choices),
            shape,
            model or (info.name if info else ""),
            asked.stream,
            config.write_timeout,
            gateway.metrics,
            gateway.drain,
            request_id_of(request),
            translated.params,
        )
