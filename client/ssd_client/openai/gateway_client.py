"""A gateway in place of targets: the same requests, the same events."""

from __future__ import annotations

import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssd.v1 import target_pb2
from ssd_client.connection.security import Security
from ssd_client.errors import (
    BadInputError,
    ClientError,
    DeadlineError,
    EndpointFullError,
    EndpointLostError,
)
from ssd_client.generate.api import Stream
from ssd_client.generate.events import Event
from ssd_client.openai.chunk_reader import ChunkReader, message_of
from ssd_client.openai.request_body import body_of, path_of
from ssd_client.openai.server import HttpRefusal, HttpServer

if TYPE_CHECKING:
    from ssd_client.generate.route import Metadata

_SILENCE_S = 120.0  # a gateway says something every fifteen seconds
_FULL, _LATE = 429, 504


class GatewayClient:
    """Sends as `Client` does; whom a stream moves to is the gateway's business."""

    def __init__(self, url: str, security: Security, timeout_s: float | None = None) -> None:
        secure = url.startswith("https:")
        _check(security, secure)
        shown = replace(security, tls=secure).metadata(url.partition("://")[2].rstrip("/"))
        silence_s = _SILENCE_S if timeout_s is None else min(timeout_s, _SILENCE_S)
        self._server = HttpServer(
            url.rstrip("/").removesuffix("/v1"),
            dict(shown),
            silence_s,
            _tls_context(security) if secure else None,
        )
        self._timeout_s = timeout_s

    def send(self, request: target_pb2.GenerateRequest, metadata: Metadata = ()) -> Stream:
        """`metadata` goes with it as headers."""
        return Stream(self._events(path_of(request), body_of(request), dict(metadata)))

    def model(self) -> dict[str, Any]:
        """The first model that is served."""
        try:
            found: dict[str, Any] = self._server.get("/v1/models")["data"][0]
        except (KeyError, IndexError, TypeError):
            raise ClientError(f"{self._server.address}: no model is served there") from None
        except (OSError, http.client.HTTPException, ValueError, HttpRefusal) as error:
            raise self._failure(error, 0) from error
        return found

    def _events(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Generator[Event, None, None]:
        reader = ChunkReader(self._server.address, body)
        try:
            for chunk in self._in_time(self._server.chunks(path, body, headers)):
                if chunk is not None:
                    yield from reader.take(chunk)
            if not reader.finished:
                raise http.client.HTTPException("the stream ended before its finish")
        except (OSError, http.client.HTTPException, ValueError, HttpRefusal) as error:
            raise self._failure(error, reader.num_tokens) from error

    def _in_time(self, chunks: Iterator[Any]) -> Iterator[Any]:
        end = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for chunk in chunks:
            if end is not None and time.monotonic() > end:
                raise DeadlineError(self._late())
            yield chunk

    def _late(self) -> str:
        return f"{self._server.address}: not finished within {self._timeout_s:g} s"

    def _failure(self, error: Exception, tokens: int) -> ClientError:
        address = self._server.address
        if isinstance(error, HttpRefusal):
            return _refusal(error, address)
        if isinstance(error, TimeoutError) and self._timeout_s is not None:
            return DeadlineError(self._late())
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EndpointLostError(address, reason, tokens)


def _refusal(error: HttpRefusal, address: str) -> ClientError:
    try:
        message = message_of(json.loads(error.said)["error"])
    except (ValueError, KeyError, TypeError):
        message = str(error)
    after = error.retry_after
    if error.http_status == _FULL:
        return EndpointFullError(f"{address}: {message}", float(after) if after.isdigit() else None)
    if error.http_status == _LATE:
        return DeadlineError(f"{address}: {message}")
    if error.http_status < http.client.INTERNAL_SERVER_ERROR:
        return BadInputError(message)
    return ClientError(f"{address}: {message}")


def _check(security: Security, secure: bool) -> None:
    if security.server_name is not None:
        raise BadInputError("--tls-server-name: not with --url, whose host is the name")
    if security.tls and not secure:
        raise BadInputError("--tls, --tls-ca: the URL begins with http://, and not with https://")


def _tls_context(security: Security) -> ssl.SSLContext:
    authority = None if security.ca is None else security.ca.decode("ascii", "replace")
    try:
        context = ssl.create_default_context(cadata=authority)
        if security.cert is not None and security.key is not None:
            with tempfile.NamedTemporaryFile() as pair:  # the library reads files alone
                pair.write(security.key + b"\n" + security.cert)
                pair.flush()
                context.load_cert_chain(pair.name)
    except ssl.SSLError as error:
        raise BadInputError(f"--tls-ca, --tls-cert, --tls-key: {error}") from None
    return context
