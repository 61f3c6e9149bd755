"""GET / and /page/…: the page and its files, read once, under a strict policy."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from ssd_gateway.http.errors import ApiError

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageRoutes:
    def __init__(self) -> None:
        folder = resources.files("ssd_gateway") / "page"
        self._files = {
            each.name: (each.read_bytes(), KINDS[suffix])
            for each in folder.iterdir()
            if (suffix := "." + each.name.rpartition(".")[2]) in KINDS
        }

    async def index(self, request: Request) -> Response:
        return self._file("index.html")

    async def file(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, f"{name!r} is no file of the page")
        data, kind = self._files[name]
        return Response(data, headers={**HEADERS, "content-type": kind})
