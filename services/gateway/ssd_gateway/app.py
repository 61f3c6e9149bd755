"""The ASGI application: routes, and what becomes of errors."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_gateway.gateway import Gateway
from ssd_gateway.http.drain import Drain, leaving
from ssd_gateway.http.errors import ApiError, api_error, log_failure
from ssd_gateway.http.protocol import incoming
from ssd_gateway.http.request_headers import with_request_id
from ssd_gateway.metrics import GatewayMetrics
from ssd_gateway.routes.generation import GenerationRoutes
from ssd_gateway.routes.models import ModelRoutes
from ssd_gateway.routes.observation import ObservationRoutes
from ssd_gateway.routes.openapi import OpenApiRoutes
from ssd_gateway.routes.operation import OperationRoutes
from ssd_gateway.routes.page import PageRoutes

Endpoint = Callable[[Request], Coroutine[Any, Any, Any]]


def make_app(gateway: Gateway) -> Starlette:
    generation, models = GenerationRoutes(gateway), ModelRoutes(gateway)
    operation, observation = OperationRoutes(gateway), ObservationRoutes(gateway)
    on = Routes(gateway.drain, gateway.metrics)
    routes = [
        on.post("/v1/chat/completions", generation.chat),
        on.post("/v1/completions", generation.completion),
        on.get("/v1/models", models.models),
        on.get("/v1/models/{model:path}", models.model),
        on.post("/tokenize", models.tokenize),
        on.post("/detokenize", models.detokenize),
        on.get("/health", operation.health),
        on.get("/ready", operation.ready),
        on.get("/version", operation.version),
        on.get("/metrics", operation.metrics),
        on.get("/openapi.json", OpenApiRoutes(gateway.config).describe),
        on.get("/ssd/fleet", observation.fleet),
        on.get("/ssd/timeline", observation.timeline),
    ]
    if gateway.config.page:
        page = PageRoutes()
        routes += [on.get("/", page.index), on.get("/page/{name}", page.file)]
    unrouted = partial(_unrouted, gateway.metrics)
    handlers: dict[Any, Any] = {HTTPException: unrouted, Exception: _failure}
    return Starlette(
        routes=routes,
        middleware=[Middleware(SaysLast, drain=gateway.drain), *_middleware(gateway)],
        exception_handlers=handlers,
    )


class SaysLast:
    """An answer to a request that has not come as a whole, or to one that comes while the gateway
    leaves, is the last one of its connection."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            is_last = self._drain.begun or not incoming(scope).is_whole
            if message["type"] == "http.response.start" and is_last:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, answer if scope["type"] == "http" else send)


class Routes:
    """Endpoints by path, each with an answer to whatever goes wrong in it."""

    def __init__(self, drain: Drain, metrics: GatewayMetrics) -> None:
        self._drain, self._metrics = drain, metrics

    def get(self, path: str, endpoint: Endpoint) -> Route:
        return Route(path, self._answered(endpoint), methods=["GET"])

    def post(self, path: str, endpoint: Endpoint) -> Route:
        return Route(path, self._answered(endpoint), methods=["POST"])

    def _answered(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Any:
            try:
                return with_request_id(request, await self._drained(endpoint(request)))
            except Exception as error:
                problem = api_error(error)
                self._metrics.failed(problem)
                log_failure(request.url.path, error, problem)
                return with_request_id(request, problem.response())

        return answer

    async def _drained(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """The answer, or that the gateway has left before there was one."""
        work = asyncio.ensure_future(answer)
        try:
            with self._drain.running(work.cancel):
                return await work
        except asyncio.CancelledError:
            if self._drain.is_over and work.cancelled():
                raise leaving() from None
            raise
        finally:
            work.cancel()


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


async def _unrouted(metrics: GatewayMetrics, request: Request, error: Exception) -> Any:
    """What the router finds: no such path, or not with this method."""
    problem = _problem(request, error)
    metrics.failed(problem)
    response = problem.response()
    response.headers.update(getattr(error, "headers", None) or {})
    return with_request_id(request, response)


def _problem(request: Request, error: Exception) -> ApiError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return ApiError(404, f"{request.url.path} is not served here", code="not_found")
    if status == 405:
        about = f"{request.url.path}: {request.method} is not served here"
        return ApiError(405, about, code="method_not_allowed")
    return ApiError(status, str(error))


async def _failure(request: Request, error: Exception) -> Any:
    return with_request_id(request, api_error(error).response())
