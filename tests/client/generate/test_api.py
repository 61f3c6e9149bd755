"""The clients of a Python program: what they send, give back, and do when a target is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import doctest
from pathlib import Path

import grpc
import pytest

import ssd_client
from ssd_client import (
    AsyncClient,
    BadInputError,
    Client,
    DeadlineError,
    EndpointLostError,
    Finished,
    GenerationResult,
    Moved,
    Started,
    Tokens,
)
from ssd_client.connection import stall
from ssd_client.generate.request import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    build_request,
)
from ssd_client.generate.request_options import RequestOptions
from tests.client.scripted_target import Running, full_text, full_tokens
from tests.waiting import HANG_SECONDS, wait_until_async

GUIDE = Path(__file__).parents[3] / "docs/python.md"
LOST = (5, grpc.StatusCode.UNAVAILABLE, "Socket closed")


def ask(
    way: str, targets: list[str], prompt: object = "Once", **options: object
) -> GenerationResult:
    """By either client."""
    if way == "Client":
        with Client(*targets) as client:
            return client.generate(prompt, **options)

    async def alone() -> GenerationResult:
        async with AsyncClient(*targets) as client:
            return await client.generate(prompt, **options)

    return asyncio.run(alone())


both = pytest.mark.parametrize("way", ["Client", "AsyncClient"])


@both
def test_a_generation_is_the_requests(way, start):
    server = start()
    result = ask(way, [server.address], seed=3, max_tokens=12, stop=["END"], mode="off")
    options = RequestOptions(seed=3, max_tokens=12, stop=["END"], mode="off")
    assert server.requests == [build_request(TextPrompt("Once"), options)]
    assert result.token_ids == full_tokens(12, 3)
    assert result.text == full_text(12, 3)
    assert result.finished.usage.completion_tokens == 12
    assert result.timing.first_after_s() <= result.timing.total_s()


@both
def test_a_prompt_may_be_token_ids(way, start):
    server = start()
    ask(way, [server.address], [5, 7])
    assert server.requests == [build_request(TokenPrompt((5, 7)), RequestOptions())]


@both
def test_a_lost_target_is_left_for_another(way, start):
    first, second = start(abort_after=LOST), start()
    result = ask(way, [first.address, second.address])
    assert result.token_ids == full_tokens(12)
    assert result.text == full_text(12)
    assert (result.endpoints, result.resumed) == ([first.address, second.address], 1)


@both
def test_one_target_alone_is_a_loss(way, start):
    with pytest.raises(EndpointLostError, match="lost after 5 tokens"):
        ask(way, [start(abort_after=LOST).address])


@both
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "mode: one of ssd, sync, off is needed, got 'fast'"),
        ({"verification": "x"}, "verification: one of coupled, rejection is needed"),
        ({"top_k": "many"}, "top_k: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"stop": "END"}, r"stop: a list of texts is needed, such as \['END'\]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: "),
        ({"temprature": 1.0}, "temprature: no such option"),
    ],
)
def test_what_cannot_be_sent_is_named(way, options, text):
    with pytest.raises(BadInputError, match=text):
        ask(way, ["127.0.0.1:1"], **options)


@both
@pytest.mark.parametrize("ids", [[-1], [2**32], ["x"]])
def test_what_is_no_token_id_is_named(way, ids):
    with pytest.raises(BadInputError, match=r"token_ids: .* is no token id"):
        ask(way, ["127.0.0.1:1"], ids)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_targets_are_arguments_of_their_own(kind):
    with pytest.raises(BadInputError, match="one argument each"):
        kind(["127.0.0.1:1", "127.0.0.1:2"])


def test_messages_come_in_several_forms(start):
    server, said = start(), (("system", "Be kind."), ("user", "Hello"))
    with Client(server.address) as client:
        client.chat("Hello")
        client.chat(said)
        client.chat([{"role": role, "content": content} for role, content in said])
        with pytest.raises(BadInputError, match="messages: 'content' is missing"):
            client.chat([{"role": "user"}])
    prompts = [ChatPrompt((("user", "Hello"),)), ChatPrompt(said), ChatPrompt(said)]
    assert server.requests == [build_request(each, RequestOptions()) for each in prompts]


def test_events_come_as_they_are_and_add_up(start):
    first, second = start(abort_after=LOST), start()
    with Client(first.address, second.address) as client, client.stream("Once") as stream:
        events = list(stream)
    kinds = [type(event) for event in events]
    assert (kinds[0], kinds[-1]) == (Started, Finished)
    assert kinds.count(Moved) == 1
    assert stream.result.text == "".join(e.text for e in events if isinstance(e, Tokens))


async def stand_still(client: AsyncClient, server: Running) -> None:
    """Once the server hangs, time passes for who looks at streams, and for nobody else."""
    now = [1e6]
    client._channels.stalls._clock = lambda: now[0]
    await wait_until_async(server.target.hanging.is_set)
    for _ in range(50):
        now[0] += stall.LOOK_SECONDS
        client._channels.stalls.look()
        await asyncio.sleep(0.01)


def test_a_target_that_stands_still_is_left_on_asyncio_too(start):
    first, second = start(hang_after=4, beat_millis=2000), start()

    async def go_on() -> GenerationResult:
        async with AsyncClient(first.address, second.address) as client:
            going = asyncio.create_task(client.generate("Once"))
            await stand_still(client, first)
            return await going

    result = asyncio.run(go_on())
    assert result.text == full_text(12)
    assert (result.endpoints, result.resumed) == ([first.address, second.address], 1)


def test_leaving_a_stream_ends_the_generation(start):
    server = start(hang_after=4)
    with Client(server.address) as client, client.stream("Once") as stream:
        assert next(stream.text())
    assert server.target.cancelled.wait(HANG_SECONDS)
    assert stream.result.finished is None
    assert stream.result.token_ids


def test_cancelling_a_task_ends_the_generation(start):
    server = start(hang_after=4)

    async def follow(client: AsyncClient, begun: asyncio.Event) -> None:
        async with client.stream("Once") as stream:
            async for _ in stream.text():
                begun.set()

    async def cancelled() -> None:
        async with AsyncClient(server.address) as client:
            begun = asyncio.Event()
            task = asyncio.create_task(follow(client, begun))
            await asyncio.wait_for(begun.wait(), HANG_SECONDS)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    assert server.target.cancelled.wait(HANG_SECONDS)


def test_a_finished_call_of_an_async_client_is_not_cancelled(start):
    server = start(linger_s=0.05)
    ask("AsyncClient", [server.address])
    assert server.target.ended_well.wait(HANG_SECONDS)


def test_async_generations_run_side_by_side(start):
    server = start()

    async def many() -> list[GenerationResult]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(client.generate("Once", seed=i) for i in range(4)))

    assert [r.token_ids for r in asyncio.run(many())] == [full_tokens(12, i) for i in range(4)]


def test_a_timeout_covers_everything(start):
    server = start(hang_after=4)
    with Client(server.address, timeout=0.3) as client, pytest.raises(DeadlineError, match=r"0\.3"):
        client.generate("Once")

    async def alone() -> None:
        async with AsyncClient(server.address, timeout=0.3) as client:
            await client.generate("Once")

    with pytest.raises(DeadlineError, match=r"0\.3"):
        asyncio.run(alone())


def test_everything_that_is_exported_is_there():
    assert all(getattr(ssd_client, name) for name in ssd_client.__all__)
    assert set(ssd_client._MODULES) == set(ssd_client.__all__)
    assert dataclasses.is_dataclass(ssd_client.Usage)
    with pytest.raises(AttributeError, match="nothing"):
        ssd_client.nothing  # noqa: B018


def test_the_guide_says_what_happens(lone_target):
    text = GUIDE.read_text().replace("127.0.0.1:7410", lone_target.address)
    parsed = doctest.DocTestParser().get_doctest(text, {}, "docs/python.md", str(GUIDE), 0)
    assert len(parsed.examples) > 20
    runner, said = doctest.DocTestRunner(verbose=False), []
    runner.run(parsed, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    parsed.globs["client"].close()
