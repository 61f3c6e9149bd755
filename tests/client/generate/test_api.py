"""The clients of a Python program: what they send, give back, and do when a target is lost."""

import asyncio
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
    GenerationResult,
)
from ssd_client.connection import stall
from ssd_client.generate.request import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    build_request,
)
from ssd_client.generate.request_options import RequestOptions
from tests.client.scripted_target import ScriptedTarget, full_text, full_tokens
from tests.waiting import HANG_SECONDS, wait_until_async

GUIDE = Path(__file__).parents[3] / "docs/python.md"
LOST = (5, grpc.StatusCode.UNAVAILABLE, "Socket closed")


def ask(
    way: str, targets: list[str], prompt: object = "Once", timeout: float | None = None, **options
) -> GenerationResult:
    """By either client."""
    if way == "Client":
        with Client(*targets, timeout=timeout) as client:
            return client.generate(prompt, **options)

    async def alone() -> GenerationResult:
        async with AsyncClient(*targets, timeout=timeout) as client:
            return await client.generate(prompt, **options)

    return asyncio.run(alone())


both = pytest.mark.parametrize("way", ["Client", "AsyncClient"])


@both
def test_a_generation_is_the_requests(way, start):
    server = start()
    result = ask(way, [server.address], seed=3, max_tokens=12, stop=["END"], mode="off")
    ask(way, [server.address], [5, 7])
    options = RequestOptions(seed=3, max_tokens=12, stop=["END"], mode="off")
    assert server.requests == [
        build_request(TextPrompt("Once"), options),
        build_request(TokenPrompt((5, 7)), RequestOptions()),
    ]
    assert (result.token_ids, result.text) == (full_tokens(12, 3), full_text(12, 3))
    assert result.finished.usage.completion_tokens == 12
    assert result.timing.first_after_s() <= result.timing.total_s()


@both
def test_a_lost_target_is_left_for_another(way, start):
    first, second = start(abort_after=LOST), start()
    result = ask(way, [first.address, second.address])
    assert (result.token_ids, result.text) == (full_tokens(12), full_text(12))
    assert (result.endpoints, result.resumed) == ([first.address, second.address], 1)
    with pytest.raises(EndpointLostError, match="lost after 5 tokens"):
        ask(way, [first.address])


@both
@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("Once", {"mode": "fast"}, "mode: one of ssd, sync, off is needed, got 'fast'"),
        ("Once", {"verification": "x"}, "verification: one of coupled, rejection is needed"),
        ("Once", {"top_k": "many"}, "top_k: "),
        ("Once", {"max_tokens": -1}, "max_tokens: "),
        ("Once", {"stop": "END"}, r"stop: a list of texts is needed, such as \['END'\]"),
        ("Once", {"logit_bias": {-1: 1.0}}, "logit_bias: "),
        ("Once", {"temprature": 1.0}, "temprature: no such option"),
        ([-1], {}, r"token_ids: .* is no token id"),
        ([2**32], {}, r"token_ids: .* is no token id"),
        (["x"], {}, r"token_ids: .* is no token id"),
    ],
)
def test_what_cannot_be_sent_is_named(way, prompt, options, text):
    with pytest.raises(BadInputError, match=text):
        ask(way, ["127.0.0.1:1"], prompt, **options)
    with pytest.raises(BadInputError, match="one argument each"):
        ask(way, [["127.0.0.1:1", "127.0.0.1:2"]])


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


async def stand_still(client: AsyncClient, server: ScriptedTarget) -> None:
    """Once the server hangs, time passes for who looks at streams, and for nobody else."""
    now = [1e6]
    client._channels.stalls._clock = lambda: now[0]
    await wait_until_async(server.hanging.is_set)
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


def test_cancelling_a_task_ends_the_generation(start):
    server = start(hang_after=4)

    async def cancelled() -> None:
        async with AsyncClient(server.address) as client:
            task = asyncio.create_task(client.generate("Once"))
            await wait_until_async(server.hanging.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    assert server.cancelled.wait(HANG_SECONDS)


def test_a_finished_call_of_an_async_client_is_not_cancelled(start):
    server = start(linger_s=0.05)
    ask("AsyncClient", [server.address])
    assert server.ended_well.wait(HANG_SECONDS)


def test_async_generations_run_side_by_side(start):
    server = start()

    async def many() -> list[GenerationResult]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(client.generate("Once", seed=i) for i in range(4)))

    assert [r.token_ids for r in asyncio.run(many())] == [full_tokens(12, i) for i in range(4)]


@both
def test_a_timeout_covers_everything(way, start):
    with pytest.raises(DeadlineError, match=r"0\.3"):
        ask(way, [start(hang_after=4).address], timeout=0.3)


def test_everything_that_is_exported_is_there():
    assert all(getattr(ssd_client, name) for name in ssd_client.__all__)
    assert set(ssd_client._MODULES) == set(ssd_client.__all__)
    assert not hasattr(ssd_client, "nothing")


def test_the_guide_says_what_happens(lone_target):
    text = GUIDE.read_text().replace("127.0.0.1:7410", lone_target.address)
    parsed = doctest.DocTestParser().get_doctest(text, {}, "docs/python.md", str(GUIDE), 0)
    assert len(parsed.examples) > 20
    runner, said = doctest.DocTestRunner(verbose=False), []
    runner.run(parsed, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    parsed.globs["client"].close()
