"""Bodies that are too large are not even read, and large ones stop nobody else."""

import asyncio
import json
import os
import pickle
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_gateway.http.errors import ApiError
from ssd_gateway.reading.prepared import (
    MAX_ALL_BYTES,
    Prepare,
    Terms,
    prepare_chat,
    prepare_completion,
    prepare_detokenize,
    prepare_tokenize,
)
from ssd_gateway.reading.process import JOB, ReadingProcess
from ssd_gateway.reading.room import BodyRoom
from tests.client.scripted_target import Script, serve
from tests.gateway.callers import exchange, post
from tests.gateway.odd_readers import dying, greedy, size_of, tight, whoever_reads
from tests.processes import GatewayProcess, gateway
from tests.waiting import HANG_SECONDS

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TERMS = Terms("id-1", {"model": pb.ChatFormat(tools="hermes", thinks=True)}, 100_000)
TAKEN = 20_000  # bytes, by the target
MIB = 1 << 20


def body_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


BODIES: list[tuple[Prepare[Any], bytes]] = [
    (prepare_chat, body_of(model="model", messages=MESSAGES, tools=TOOLS, seed=1, n=2)),
    (prepare_completion, body_of(prompt=["a", "b"], echo=True, stream=True, seed=1)),
    (prepare_completion, body_of(prompt=[1, 2], request_id="own", seed=1)),
    (prepare_completion, body_of(prompt="a", n=0)),
    (prepare_completion, body_of(prompt="a" * 200_000)),
    (prepare_tokenize, body_of(prompt="Once", return_token_strs=True)),
    (prepare_detokenize, body_of(tokens=[1, 2, 3])),
    (prepare_detokenize, b"no JSON"),
]


def told(prepared: Any) -> Any:
    """What can be compared."""
    if isinstance(prepared, ApiError):
        return prepared.__reduce__()
    return {**vars(prepared), "problem": prepared.problem and told(prepared.problem)}


def in_process(run: Callable[[ReadingProcess], Awaitable[Any]]) -> Any:
    """What this comes to with a process that reads."""

    async def beside() -> Any:
        process = ReadingProcess()
        try:
            return await run(process)
        finally:
            await process.close()

    return asyncio.run(beside())


def test_another_process_reads_as_this_one_does() -> None:
    async def outcomes(process: ReadingProcess) -> list[Any]:
        read = (process.prepare(how, body, TERMS) for how, body in BODIES)
        return await asyncio.gather(*read, return_exceptions=True)

    for outcome, (how, body) in zip(in_process(outcomes), BODIES, strict=True):
        try:
            here: Any = how(body, TERMS)
        except ApiError as error:
            here = error
        assert told(outcome) == told(here)


def test_what_is_too_much_for_the_process_is_refused_and_it_goes_on() -> None:
    async def read(process: ReadingProcess) -> None:
        pids = [(await process.prepare(whoever_reads, b"", TERMS)).asked]
        for hostile in (greedy, dying):
            with pytest.raises(ApiError) as caught:
                await process.prepare(hostile, b"", TERMS)
            assert (caught.value.status, caught.value.code) == (413, "request_too_large")
            pids.append((await process.prepare(whoever_reads, b"", TERMS)).asked)
        assert pids[0] == pids[1] != pids[2]
        assert os.getpid() not in pids

    in_process(read)


def test_a_body_that_finds_no_memory_is_not_taken_for_what_to_do() -> None:
    """It looks like a job: a caller's bytes would be unpickled."""
    job = pickle.dumps((whoever_reads, TERMS))
    rest = 4 * MIB - JOB.size - len(job)
    body = 16 * (JOB.pack(len(job), rest) + job + bytes(rest))

    async def read(process: ReadingProcess) -> None:
        await process.prepare(tight, b"", TERMS)
        with pytest.raises(ApiError) as caught:
            await process.prepare(size_of, body, TERMS)
        assert caught.value.code == "request_too_large"
        assert (await process.prepare(size_of, bytes(7), TERMS)).asked == 7

    in_process(read)


def test_a_process_that_cannot_begin_is_no_fault_of_the_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def read(process: ReadingProcess) -> None:
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(ApiError) as caught:
                await process.prepare(size_of, b"", TERMS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        problem = caught.value
        assert (problem.status, problem.code, problem.retry_after) == (503, "overloaded", 1)
        assert "Too many open files" in caplog.text
        assert (await process.prepare(size_of, bytes(7), TERMS)).asked == 7

    in_process(read)


def test_the_smallest_is_read_first_and_who_leaves_leaves_the_others_their_turn() -> None:
    async def read(process: ReadingProcess) -> list[int]:
        done: list[int] = []

        async def one(size: int) -> None:
            await process.prepare(size_of, bytes(size), TERMS, lambda: size == 5)
            done.append(size)

        tasks = [asyncio.ensure_future(one(size)) for size in (50, 40, 30, 20, 10, 5)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # it has the first turn
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert in_process(read) == [10, 20, 40]


@asynccontextmanager
async def room_with(size: int, *bodies: tuple[str, int]) -> AsyncIterator[BodyRoom]:
    """One of this size in which bodies are held, by host and size."""
    room = BodyRoom(size)
    async with AsyncExitStack() as held:
        for host, each in bodies:
            await held.enter_async_context(room.held(host, each, 0))
        yield room


async def refusal(room: BodyRoom, host: str, size: int) -> tuple[int, float | None] | None:
    try:
        async with room.held(host, size, 0):
            return None
    except ApiError as error:
        return error.status, error.retry_after


@pytest.mark.parametrize(
    ("held", "host", "size", "fits"),
    [
        ([("a", 40), ("b", 30)], "a", 11, False),
        ([("a", 40), ("b", 30)], "c", 31, False),
        ([("a", 40), ("b", 30)], "c", 30, True),
        # Above a mebibyte, a quarter is left to others.
        ([("a", 3 * MIB), ("a", 3 * MIB), ("b", 6 * MIB)], "a", MIB + 1, False),
        ([("a", 3 * MIB), ("a", 3 * MIB), ("b", 6 * MIB)], "c", MIB + 1, False),
        ([("a", 3 * MIB), ("a", 3 * MIB), ("b", 6 * MIB)], "c", MIB, True),
        ([], "a", 16 * MIB, True),  # alone, it may take all
    ],
)
def test_nobody_has_more_than_half_of_the_room(
    held: list[tuple[str, int]], host: str, size: int, fits: bool
) -> None:
    async def hold() -> tuple[int, float | None] | None:
        async with room_with(16 * MIB if size > 100 else 100, *held) as room:
            return await refusal(room, host, size)

    assert asyncio.run(hold()) == (None if fits else (503, 1))


def test_who_may_wait_gets_the_room_that_others_leave() -> None:
    async def hold() -> None:
        async with room_with(100, ("a", 40), ("b", 30)) as room:
            async with room.held("c", 30, 0):
                waiting = asyncio.ensure_future(room.held("c", 20, HANG_SECONDS).__aenter__())
                await asyncio.sleep(0)
                assert not waiting.done()
            await waiting

    asyncio.run(hold())


def test_what_no_model_is_known_for_is_read_by_the_form_of_all() -> None:
    own, others = pb.ChatFormat(thinks=True), pb.ChatFormat(tools="hermes")
    terms = Terms(forms={None: others, "model": own})
    assert [terms.form_of(model) for model in ("model", "new", None)] == [own, others, others]


def test_choices_do_not_multiply_a_long_prompt_without_end() -> None:
    body = body_of(prompt="a" * MIB, n=128)
    assert prepare_completion(body, Terms()).problem is not None
    some = body_of(prompt="a" * MIB, n=MAX_ALL_BYTES // MIB - 1)
    assert prepare_completion(some, Terms()).problem is None


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Of a target that takes little; it has room for one body."""
    folder = tmp_path_factory.mktemp("large")
    flags = ("--max-bodies-mib", "1", "--max-body-mib", "1", "--read-timeout", "2")
    with (
        serve(Script(max_request_bytes=TAKEN)) as model,
        gateway(folder, *flags, targets=[model.address]) as process,
    ):
        yield process


def refused(front: GatewayProcess, body: bytes, sent: int) -> dict[str, Any]:
    """The error where so much of the body is sent."""
    request = post("/v1/completions", body, "connection: close\r\n")
    answer = exchange(front, request[: len(request) - len(body) + sent])
    head, _, told = answer.partition(b"\r\n\r\n")
    assert b" 413 " in head
    return dict(json.loads(told)["error"])


def test_what_a_target_would_refuse_is_not_sent_and_what_none_takes_is_not_even_read(
    front: GatewayProcess,
) -> None:
    assert refused(front, bytes(6 * TAKEN + 1), sent=0)["code"] == "request_too_large"
    body = body_of(prompt="a" * (TAKEN + 1))
    error = refused(front, body, sent=len(body))
    assert (error["param"], f"which takes {TAKEN}" in error["message"]) == ("prompt", True)
