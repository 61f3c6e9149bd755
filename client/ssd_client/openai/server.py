"""A server that speaks OpenAI's protocol: how it is reached, and the chunks that it streams."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from ssd_client.errors import ClientError

_MOST_SAID = 2000  # bytes of a refusal that are read


class HttpRefusal(ClientError):
    """The server has answered with another status than 200."""

    def __init__(self, status: int, said: bytes, retry_after: str) -> None:
        super().__init__(f"HTTP {status}: {said.decode('utf-8', 'replace')}")
        self.http_status, self.said, self.retry_after = status, said, retry_after


class HttpServer:
    """Every request has a connection of its own, which ends with it."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float | None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_s`: for each read; `context`: for https, the system's where there is none."""
        self._url = urllib.parse.urlsplit(url.rstrip("/"))
        self._headers, self._timeout_s, self._context = headers, timeout_s, context

    @property
    def address(self) -> str:
        return self._url.netloc

    def get(self, path: str) -> Any:
        """The JSON behind a path."""
        with self._asked("GET", path) as response:
            return json.loads(response.read())

    def chunks(
        self, path: str, content: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """What a stream of events says, up to its [DONE]; None for lines that say nothing."""
        body = json.dumps(content)
        with self._asked("POST", path, body, headers or {}) as response:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    yield None
                elif data != b"[DONE]":
                    yield json.loads(data)

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] = {}
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            shown = {"Content-Type": "application/json", **self._headers, **headers}
            connection.request(method, self._url.path + path, body, shown)
            response = connection.getresponse()
            if response.status != http.client.OK:
                after = response.headers.get("Retry-After", "")
                raise HttpRefusal(response.status, response.read(_MOST_SAID), after)
            yield response
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(
                host, port, timeout=self._timeout_s, context=self._context
            )
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
