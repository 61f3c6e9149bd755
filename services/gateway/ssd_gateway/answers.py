"""An answer on its way: the choices of a request are read from targets, and passed on as they come.

What has come while the reader was not ready is passed on as one chunk.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ssd_gateway.http.drain import Drain, leaving
from ssd_gateway.http.errors import ApiError, api_error, log_failure
from ssd_gateway.http.events import DONE, PING, EventStream, ReaderGone, event, gone
from ssd_gateway.http.protocol import incoming
from ssd_gateway.metrics import GatewayMetrics
from ssd_gateway.openai.choice import Choice
from ssd_gateway.openai.fields import StreamOptions
from ssd_gateway.openai.shapes import Shape, usage_of
from ssd_gateway.openai.speculation_metrics import metrics_of
from ssd_gateway.targets.generation import Generation

log = logging.getLogger(__name__)

PING_SECONDS = 15.0  # without a chunk, after which proxies are told that we live


class Answer:
    """Reads all choices at once; ``news`` is set whenever there is something to pass on."""

    def __init__(
        self, choices: Sequence[Choice], generations: Sequence[Generation], per_prompt: int
    ) -> None:
        self.choices, self.per_prompt = choices, per_prompt
        self._generations = generations
        self.begun_at = time.monotonic()
        self.first_at: float | None = None  # when the first token was there
        self.failure: BaseException | None = None
        self.news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        pairs = zip(self.choices, self._generations, strict=True)
        self._tasks = [asyncio.ensure_future(self._read(*pair)) for pair in pairs]

    async def _read(self, choice: Choice, generation: Generation) -> None:
        try:
            async with aclosing(generation.responses()) as responses:
                async for response in responses:
                    choice.take(response)
                    choice.target = generation.target.address
                    choice.num_moves = generation.num_moves
                    if self.first_at is None and choice.pending:
                        self.first_at = time.monotonic()
                    self.news.set()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, if nothing has yet."""
        self.failure = self.failure or error
        self.news.set()

    @property
    def seconds(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self.begun_at

    @property
    def first_seconds(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.begun_at

    @property
    def is_admitted(self) -> bool:
        """Whether targets have taken all choices on."""
        return all(each.started is not None for each in self.choices)

    @property
    def is_over(self) -> bool:
        return all(each.finish is not None for each in self.choices)

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits for news. False: there were none in time."""
        if not self.news.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self.news.wait()
            except TimeoutError:
                return False
        self.news.clear()
        return True

    def check(self) -> None:
        """Raises what has ended the answer."""
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Whatever still runs is cancelled: targets free it at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_moves(self) -> int:
        return sum(each.num_moves for each in self._generations)


class AnswerResponse:
    """The HTTP response of one answer: in one piece, or as events."""

    def __init__(
        self,
        answer: Answer,
        shape: Shape,
        model: str,
        stream: StreamOptions | None,
        write_timeout: float,
        metrics: GatewayMetrics,
        drain: Drain,
        request_id: str,
        params: Mapping[str, str],
    ) -> None:
        """``stream``: None for one piece. ``params``: names of fields, for errors of targets."""
        self._answer, self._shape, self._stream = answer, shape, stream
        self._write_timeout, self._metrics = write_timeout, metrics
        self._drain = drain
        self._params = params
        self._sent = False  # the whole answer
        self._cut = False
        self._headers = [(b"x-request-id", request_id.encode())]
        self._about = {
            "id": f"{shape.prefix}-{token_hex(12)}",
            "object": shape.whole if stream is None else shape.chunk,
            "created": int(time.time()),
            "model": model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._drain.running(partial(self._answer.fail, leaving())):
            await self._answer_caller(scope, receive, send)

    async def _answer_caller(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer_all(scope, receive, send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not self._sent:  # who has all of it may go
                self._metrics.gone()
                answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if self._cut:  # a connection that is merely closed waits for its reader
                incoming(scope).abort()
                await leaving
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, events = self._answer, EventStream(send, self._write_timeout, self._headers)
        self._metrics.began()
        try:
            answer.start()
            while not answer.is_admitted:
                answer.check()
                await answer.wait()
            if self._stream is None:
                await self._send_whole(send)
            else:
                await self._send_events(events, self._stream)
            self._count()
        except ReaderGone as error:
            self._metrics.gone()
            log.info("a stream was cut: %s", error)
            self._cut = True
        except Exception as error:
            await self._fail(api_error(error, self._params), error, events, scope, receive, send)
        finally:
            self._metrics.left(answer.num_moves)
            await answer.close()

    async def _fail(
        self,
        problem: ApiError,
        error: Exception,
        events: EventStream,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._sent = True
        self._metrics.failed(problem)
        log_failure("a request", error, problem)
        if events.begun:
            await events.end(event(problem.body()) + DONE)
        else:
            response = problem.response()
            response.raw_headers.extend(self._headers)
            await response(scope, receive, send)

    # In one piece

    async def _send_whole(self, send: Send) -> None:
        answer = self._answer
        while not answer.is_over:
            answer.check()
            await answer.wait()
        body = msgspec.json.encode(
            {
                **self._about,
                "system_fingerprint": _fingerprint(answer.choices),
                "choices": [self._shape.whole_choice(c, c.pass_on()) for c in answer.choices],
                "usage": usage_of(answer.choices, answer.per_prompt),
                "metrics": self._speculation(),
            }
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sent = True
        await send({"type": "http.response.body", "body": body})

    # As events

    async def _send_events(self, events: EventStream, options: StreamOptions) -> None:
        answer = self._answer
        while True:
            failure = answer.failure  # what has come before it is passed on
            chunks = [self._chunk(choice, options) for choice in answer.choices if choice.has_news]
            if chunks:
                await events.write(b"".join(filter(None, chunks)))
            if all(choice.finish_told for choice in answer.choices):
                break
            if failure is not None and not answer.is_over:
                raise failure
            if not await answer.wait(PING_SECONDS):
                await events.write(PING)
        last = event(self._last_chunk()) if options.include_usage else b""
        self._sent = True
        await events.end(last + DONE)

    def _chunk(self, choice: Choice, options: StreamOptions) -> bytes:
        delta = choice.pass_on()
        if delta.is_empty and choice.finish is None:
            return b""
        content: dict[str, Any] = {
            **self._about,
            "choices": [self._shape.chunk_choice(choice, delta)],
        }
        if options.continuous_usage_stats:
            content["usage"] = usage_of(self._answer.choices, self._answer.per_prompt)
        elif options.include_usage:
            content["usage"] = None
        return event(content)

    def _last_chunk(self) -> dict[str, Any]:
        answer = self._answer
        return {
            **self._about,
            "system_fingerprint": _fingerprint(answer.choices),
            "choices": [],
            "usage": usage_of(answer.choices, answer.per_prompt),
            "metrics": self._speculation(),
        }

    def _speculation(self) -> dict[str, Any]:
        answer = self._answer
        return metrics_of(answer.choices, answer.first_seconds, answer.seconds)

    def _count(self) -> None:
        answer = self._answer
        tokens = sum(choice.num_tokens for choice in answer.choices)
        self._metrics.ended(tokens, answer.seconds, answer.first_seconds)


def _fingerprint(choices: Sequence[Choice]) -> str | None:
    started = choices[0].started
    return None if started is None else started.model_fingerprint
