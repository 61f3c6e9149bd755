"""GET /health, /ready, /version, /metrics: for those who run it."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ssd_gateway import __version__
from ssd_gateway.gateway import Gateway
from ssd_gateway.routes.models import json_response


class OperationRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        """It lives: whether it can serve is told by /ready."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        gateway = self._gateway
        able = any(target.ready for target in gateway.pool) and not gateway.drain.begun
        headers = {} if able else {"retry-after": "1"}
        return Response(status_code=200 if able else 503, headers=headers)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        self._gateway.keys.check(request)
        return Response(self._gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)
