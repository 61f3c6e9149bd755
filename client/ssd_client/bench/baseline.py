"""Another engine on the same prompts: any server that streams OpenAI's completions."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from ssd_client.bench.requests import Measured
from ssd_client.bench.settings import Settings
from ssd_client.errors import BadInputError, ClientError

PREFIX = "openai:"
_TIMEOUT_S = 600.0


def check_baseline(text: str) -> str:
    """`openai:URL`, the URL up to and with /v1."""
    url = urllib.parse.urlsplit(text.removeprefix(PREFIX))
    if not text.startswith(PREFIX) or url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{text!r} is not openai:http://HOST:PORT/v1")
    return text


class OpenAIAsk:
    """Asks a server of OpenAI's protocol."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._url = urllib.parse.urlsplit(name.removeprefix(PREFIX).rstrip("/"))
        self._settings = settings
        self._model = self._first_model()

    @property
    def model(self) -> str:
        return self._model

    def __call__(self, number: int, prompt: str) -> Measured:
        begin = time.monotonic()
        arrivals: list[tuple[float, int]] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        error = None
        try:
            for chunk in self._stream(prompt, self._settings.seed + number):
                usage = chunk.get("usage") or usage
                text = _text_of(chunk)
                if text:
                    arrivals.append((time.monotonic(), 1))
                    texts.append(text)
        except (OSError, http.client.HTTPException, ValueError) as failure:
            error = f"{self._url.netloc}: {failure}"
        except ClientError as failure:
            error = str(failure)
        missing = int(usage.get("completion_tokens", 0)) - len(arrivals)
        if arrivals and missing > 0:  # several tokens in a chunk, or tokens without text
            arrivals[-1] = (arrivals[-1][0], 1 + missing)
        if error is None and not arrivals:
            error = f"{self._url.netloc}: nothing was generated"
        return Measured(
            number,
            begin,
            time.monotonic(),
            arrivals,
            text="".join(texts),
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            error=error,
        )

    def _stream(self, prompt: str, seed: int) -> Iterator[dict[str, Any]]:
        settings = self._settings
        content: dict[str, Any] = {
            "model": self._model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            content["ignore_eos"] = True  # vLLM, SGLang and llama.cpp know it
        if settings.chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        path = "/chat/completions" if settings.chat else "/completions"
        connection = self._connect()
        try:
            connection.request(
                "POST",
                self._url.path + path,
                json.dumps(content),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                said = response.read(500).decode("utf-8", "replace")
                raise ClientError(f"{self._url.netloc}: HTTP {response.status}: {said}")
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", self._url.path + "/models")
            content = json.loads(connection.getresponse().read())
            return str(content["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"--baseline {self._url.geturl()}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise BadInputError(
                f"--baseline {self._url.geturl()}: no list of models there, is this OpenAI's "
                "protocol, and does the URL end in /v1?"
            ) from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        return kind(self._url.hostname or "", self._url.port, timeout=_TIMEOUT_S)


def _text_of(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    choice = choices[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
