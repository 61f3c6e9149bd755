"""The ASGI application: routes, and what becomes of errors."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_gateway.gateway import Gateway
from ssd_gateway.http.errors import ApiError, api_error
from ssd_gateway.http.protocol import incoming
from ssd_gateway.http.request_headers import with_request_id
from ssd_gateway.routes.generation import GenerationRoutes
from ssd_gateway.routes.models import ModelRoutes
from ssd_gateway.routes.observation import ObservationRoutes
from ssd_gateway.routes.openapi import OpenApiRoutes
from ssd_gateway.routes.operation import OperationRoutes
from ssd_gateway.routes.page import PageRoutes

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Any]]


def make_app(gateway: Gateway) -> Starlette:
    generation, models = GenerationRoutes(gateway), ModelRoutes(gateway)
    operation, observation = OperationRoutes(gateway), ObservationRoutes(gateway)
    routes = [
        _post("/v1/chat/completions", generation.chat),
        _post("/v1/completions", generation.completion),
        _get("/v1/models", models.models),
        _get("/v1/models/{model:path}", models.model),
        _post("/tokenize", models.tokenize),
        _post("/detokenize", models.detokenize),
        _get("/health", operation.health),
        _get("/ready", operation.ready),
        _get("/version", operation.version),
        _get("/metrics", operation.metrics),
        _get("/openapi.json", OpenApiRoutes(gateway.config).describe),
        _get("/ssd/fleet", observation.fleet),
        _get("/ssd/timeline", observation.timeline),
    ]
    if gateway.config.page:
        page = PageRoutes()
        routes += [_get("/", page.index), _get("/page/{name}", page.file)]
    handlers = {HTTPException: _http_error, Exception: _failure}
    return Starlette(
        routes=routes,
        middleware=[Middleware(SaysLast), *_middleware(gateway)],
        exception_handlers=handlers,
    )


class SaysLast:
    """An answer to a request that has not come as a whole is the last one of its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not incoming(scope).is_whole:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, answer if scope["type"] == "http" else send)


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, _answered(endpoint), methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, _answered(endpoint), methods=["POST"])


def _answered(endpoint: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Any:
        try:
            return with_request_id(request, await endpoint(request))
        except Exception as error:
            problem = api_error(error)
            if problem.status == 500:
                log.error("%s failed", request.url.path, exc_info=error)
            return with_request_id(request, problem.response())

    return answer


def _middleware(gateway: Gateway) -> list[Middleware]:
    origins = gateway.config.cors_origin
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


async def _http_error(request: Request, error: Exception) -> Any:
    return with_request_id(request, _problem(request, error))


def _problem(request: Request, error: Exception) -> Response:
    """What the router finds: no such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return ApiError(404, f"{request.url.path} is not served here", code="not_found").response()
    if status == 405:
        problem = ApiError(
            405,
            f"{request.url.path}: {request.method} is not served here",
            code="method_not_allowed",
        )
        response = problem.response()
        response.headers.update(getattr(error, "headers", None) or {})
        return response
    return ApiError(status, str(error)).response()


async def _failure(request: Request, error: Exception) -> Any:
    return with_request_id(request, api_error(error).response())
