"""What has come of an answer is passed on before its caller hears why there is no more."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from ssd.v1 import target_pb2 as pb
from ssd_gateway.answers import Answer, AnswerResponse
from ssd_gateway.http.drain import Drain, leaving
from ssd_gateway.metrics import GatewayMetrics
from ssd_gateway.openai.choice import Choice
from ssd_gateway.openai.fields import StreamOptions
from ssd_gateway.openai.shapes import CompletionShape
from ssd_gateway.openai.translation import Wanted
from ssd_gateway.targets.generation import Generation
from ssd_gateway.targets.pool import TargetPool
from tests.waiting import HANG_SECONDS

STARTED = pb.GenerateResponse(started=pb.GenerateStarted(prompt_tokens=3))
FINISH = pb.GenerateResponse(finish=pb.GenerateFinish(reason=pb.FINISH_REASON_STOP))


def said(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[1], text=text))


@dataclass
class Scripted:
    """Gives what is put in its queue: responses, and then maybe an error."""

    queue: asyncio.Queue[pb.GenerateResponse | Exception] = field(default_factory=asyncio.Queue)
    target: Any = field(default_factory=lambda: SimpleNamespace(address="target"))
    num_moves: int = 0

    async def responses(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        while True:
            match await self.queue.get():
                case Exception() as error:
                    raise error
                case pb.GenerateResponse() as response:
                    yield response

    def put(self, *what: pb.GenerateResponse | Exception) -> None:
        for each in what:
            self.queue.put_nowait(each)


async def answered(
    generation: Scripted,
    stream: StreamOptions | None,
    at_first: Callable[[Answer], Awaitable[None]],
) -> list[str]:
    """Bodies that were sent; before the first of a stream is taken, ``at_first`` happens."""
    answer = Answer([Choice(0, Wanted())], [cast(Generation, generation)], 1)
    sent: list[str] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"].decode())
            if len(sent) == 1 and stream is not None:
                await at_first(answer)

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    drain, metrics = Drain(1.0), GatewayMetrics(cast(TargetPool, []))
    response = AnswerResponse(
        answer, CompletionShape(), "m", stream, HANG_SECONDS, metrics, drain, "id", {}
    )
    if stream is None:
        await at_first(answer)
    await asyncio.wait_for(response({"type": "http"}, receive, send), HANG_SECONDS)
    return sent


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_slow_reader_gets_what_came_before_the_end(is_whole: bool) -> None:
    async def stream() -> list[str]:
        generation = Scripted()
        generation.put(STARTED, said("Once"))

        async def meanwhile(answer: Answer) -> None:
            generation.put(said(" upon"), *[FINISH] * is_whole, leaving())
            while answer.failure is None:
                await asyncio.sleep(0)

        return await answered(generation, StreamOptions(), meanwhile)

    *told, done = "".join(asyncio.run(stream())).strip().split("\n\n")
    first, second, *error = (json.loads(each.removeprefix("data: ")) for each in told)
    assert [each["choices"][0]["text"] for each in (first, second)] == ["Once", " upon"]
    assert second["choices"][0]["finish_reason"] == ("stop" if is_whole else None)
    assert [each["error"]["code"] for each in error] == ([] if is_whole else ["leaving"])
    assert done == "data: [DONE]"


def test_an_answer_in_one_piece_that_is_whole_is_no_error() -> None:
    async def whole() -> list[str]:
        generation = Scripted()
        generation.put(STARTED, said("Once"), FINISH, leaving())
        return await answered(generation, None, lambda _: asyncio.sleep(0))

    (answer,) = asyncio.run(whole())
    assert json.loads(answer)["choices"][0]["text"] == "Once"
