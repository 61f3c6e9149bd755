"""Other engines, as far as they stream OpenAI's completions: vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from ssd_client.bench.measure.requests import MeasuredRequest
from ssd_client.errors import BadInputError, ClientError
from ssd_client.openai.server import HttpRefusal, HttpServer
from ssd_client.openai.url import check_url

PREFIX = "openai:"
_TIMEOUT_S = 600.0


def check_baseline(text: str) -> str:
    """`openai:URL`, the URL up to and with /v1."""
    with contextlib.suppress(ValueError):
        if text.startswith(PREFIX):
            return PREFIX + check_url(text.removeprefix(PREFIX))
    raise ValueError(f"{text!r} is not openai:http://HOST:PORT/v1")


class OpenAIServer:
    """The part of OpenAI's protocol that is needed here."""

    def __init__(self, name: str) -> None:
        self._url = name.removeprefix(PREFIX)
        self._server = HttpServer(self._url, _headers(), _TIMEOUT_S)
        self.model = self._first_model()

    def measure(self, number: int, content: dict[str, Any]) -> MeasuredRequest:
        """One request; what went wrong is part of the answer."""
        begin = time.monotonic()
        heard = _Heard()
        error = None
        try:
            for chunk in self._stream(content):
                heard.take(chunk)
            heard.check()
        except (OSError, http.client.HTTPException, ValueError, ClientError) as failure:
            error = f"{self._server.address}: {failure}"
        return MeasuredRequest(
            number,
            begin,
            time.monotonic(),
            heard.counted(),
            text="".join(heard.texts),
            prompt_tokens=heard.usage.get("prompt_tokens", 0),
            error=error,
        )

    def _stream(self, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        whole = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **content,
        }
        path = "/chat/completions" if "messages" in content else "/completions"
        return (chunk for chunk in self._server.chunks(path, whole) if chunk is not None)

    def _first_model(self) -> str:
        try:
            return str(self._server.get("/models")["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"--baseline {self._url}: {error}") from error
        except (HttpRefusal, ValueError, KeyError, IndexError, TypeError):
            raise BadInputError(
                f"--baseline {self._url}: no list of models there, is this OpenAI's "
                "protocol, and does the URL end in /v1?"
            ) from None


class _Heard:
    """A stream, chunk by chunk."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, int] = {}
        self._ended = False

    def take(self, chunk: Any) -> None:
        """Raises ValueError for what no server of this protocol says, or for its error."""
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ValueError(f"the server says {json.dumps(chunk)[:300]}")
        usage = chunk.get("usage") or {}
        self.usage |= {name: n for name, n in usage.items() if isinstance(n, int)}
        choice = (chunk.get("choices") or [{}])[0]
        self._ended = self._ended or choice.get("finish_reason") is not None
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            self.arrivals.append(time.monotonic())
            self.texts.append(text)

    def check(self) -> None:
        if not self._ended and not self.usage:
            raise ValueError("the stream ended before its finish")
        if not self.arrivals:
            raise ValueError("nothing was generated")

    def counted(self) -> list[tuple[float, int]]:
        """Arrivals with the tokens that each brought: one, unless the server counts more in all."""
        found = [(at, 1) for at in self.arrivals]
        missing = self.usage.get("completion_tokens", 0) - len(found)
        if found and missing > 0:  # several tokens in a chunk, or tokens without text
            found[-1] = (found[-1][0], 1 + missing)
        return found


def _headers() -> dict[str, str]:
    """Headers with the key that users of this protocol keep in their environment."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
