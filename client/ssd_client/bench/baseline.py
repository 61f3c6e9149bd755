"""Another engine on the same prompts: any server that streams OpenAI's completions."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Sequence
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


class OpenAIServer:
    """The part of OpenAI's protocol that is needed here."""

    def __init__(self, name: str) -> None:
        self._url = urllib.parse.urlsplit(name.removeprefix(PREFIX).rstrip("/"))
        self.model = self._first_model()

    def measure(self, number: int, content: dict[str, Any]) -> Measured:
        """One request; what went wrong is part of the answer."""
        begin = time.monotonic()
        arrivals: list[tuple[float, int]] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        error = None
        try:
            for chunk in self._stream(content):
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

    def _stream(self, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        whole = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **content,
        }
        path = "/chat/completions" if "messages" in content else "/completions"
        connection = self._connect()
        try:
            connection.request(
                "POST",
                self._url.path + path,
                json.dumps(whole),
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
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=_TIMEOUT_S)


class OpenAIAsk:
    """Asks one, as a benchmark does."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._server, self._settings = OpenAIServer(name), settings

    def __call__(self, number: int, prompt: str) -> Measured:
        settings = self._settings
        content: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed + number,
        }
        if settings.ignore_eos:
            content["ignore_eos"] = True  # vLLM, SGLang and llama.cpp know it
        if settings.chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        return self._server.measure(number, content)


class OpenAIChat:
    """Asks one, as a chat does."""

    def __init__(self, name: str) -> None:
        self._server = OpenAIServer(name)
        self.model = self._server.model

    def reply(
        self, messages: Sequence[tuple[str, str]], tokens: int, temperature: float | None
    ) -> Measured:
        content: dict[str, Any] = {
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": max(1, tokens),
        }
        if temperature is not None:
            content["temperature"] = temperature
        measured = self._server.measure(0, content)
        if measured.error is not None:
            raise ClientError(measured.error)
        return measured


def _text_of(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    choice = choices[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
