"""Bodies that are too large are not even read, and large ones stop nobody else."""

import asyncio
import json
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
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
from tests.gateway.odd_readers import dying, greedy, size_of, tight, whoever_reads
from tests.gateway.scripted_model import ScriptedModel, serving
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


async def outcome(process: ReadingProcess, how: Prepare[Any], body: bytes) -> Any:
    try:
        return told(await process.prepare(how, body, TERMS))
    except ApiError as error:
        return told(error)


def test_another_process_reads_as_this_one_does() -> None:
    def here(how: Prepare[Any], body: bytes) -> Any:
        try:
            return told(how(body, TERMS))
        except ApiError as error:
            return told(error)

    async def all_of_them() -> None:
        process = ReadingProcess()
        for how, body in BODIES:
            assert await outcome(process, how, body) == here(how, body)
        await process.close()

    asyncio.run(all_of_them())


def test_what_is_too_much_for_the_process_is_refused_and_it_goes_on() -> None:
    async def read() -> None:
        process = ReadingProcess()
        pids = [(await process.prepare(whoever_reads, b"", TERMS)).asked]
        for hostile in (greedy, dying):
            with pytest.raises(ApiError) as caught:
                await process.prepare(hostile, b"", TERMS)
            assert (caught.value.status, caught.value.code) == (413, "request_too_large")
            pids.append((await process.prepare(whoever_reads, b"", TERMS)).asked)
        assert pids[0] == pids[1] != pids[2]
        assert os.getpid() not in pids
        await process.close()

    asyncio.run(read())


def test_a_body_that_finds_no_memory_is_not_taken_for_what_to_do() -> None:
    """It looks like a job: a caller's bytes would be unpickled."""
    job = pickle.dumps((whoever_reads, TERMS))
    rest = 4 * MIB - JOB.size - len(job)
    body = 16 * (JOB.pack(len(job), rest) + job + bytes(rest))

    async def read() -> None:
        process = ReadingProcess()
        await process.prepare(tight, b"", TERMS)
        with pytest.raises(ApiError) as caught:
            await process.prepare(size_of, body, TERMS)
        assert caught.value.code == "request_too_large"
        assert (await process.prepare(size_of, bytes(7), TERMS)).asked == 7
        await process.close()

    asyncio.run(read())


def test_a_process_that_cannot_begin_is_no_fault_of_the_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def read() -> None:
        process = ReadingProcess()
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(ApiError) as caught:
                await process.prepare(size_of, b"", TERMS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert caught.value.retry_after == 1
        assert "Too many open files" in caplog.text
        assert (await process.prepare(size_of, bytes(7), TERMS)).asked == 7
        await process.close()

    asyncio.run(read())


def test_the_smallest_is_read_first_and_who_leaves_leaves_the_others_their_turn() -> None:
    async def read() -> list[int]:
        process, done = ReadingProcess(), list[int]()

        async def one(size: int) -> None:
            await process.prepare(size_of, bytes(size), TERMS, lambda: size == 5)
            done.append(size)

        tasks = [asyncio.ensure_future(one(size)) for size in (50, 40, 30, 20, 10, 5)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # it has the first turn
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await process.close()
        return done

    assert asyncio.run(read()) == [10, 20, 40]


def test_nobody_has_more_than_half_of_the_room() -> None:
    async def hold() -> None:
        room = BodyRoom(100)
        async with room.held("a", 40, 0), room.held("b", 30, 0):
            for host, size in (("a", 11), ("c", 31)):
                with pytest.raises(ApiError) as caught:
                    async with room.held(host, size, 0):
                        pass
                assert (caught.value.status, caught.value.retry_after) == (503, 1)
            async with room.held("c", 30, 0):
                waiting = asyncio.ensure_future(room.held("c", 20, HANG_SECONDS).__aenter__())
                await asyncio.sleep(0)
                assert not waiting.done()
            await waiting

    asyncio.run(hold())


def test_larger_bodies_leave_a_quarter_to_others() -> None:
    async def hold() -> None:
        room = BodyRoom(16 * MIB)
        async with AsyncExitStack() as held:
            for host, size in (("a", 3), ("a", 3), ("b", 6)):
                await held.enter_async_context(room.held(host, size * MIB, 0))
            for host in ("a", "c"):
                with pytest.raises(ApiError):
                    await held.enter_async_context(room.held(host, MIB + 1, 0))
                await held.enter_async_context(room.held(host, MIB, 0))
        async with room.held("a", 16 * MIB, 0):  # alone, it may take all
            pass

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


def test_errors_survive_a_process() -> None:
    error = ApiError(503, "why", "server_error", "n", "code", 2.0)
    assert told(pickle.loads(pickle.dumps(error))) == told(error)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Of a target that takes little; it has room for one body."""
    folder = tmp_path_factory.mktemp("large")
    flags = ("--max-bodies-mib", "1", "--max-body-mib", "1", "--read-timeout", "2")
    model = ScriptedModel(pb.ChatFormat(), lambda _: "Once", max_request_bytes=TAKEN)
    with serving(model), gateway(folder, *flags, targets=[model.address]) as process:
        yield process


def post(front: GatewayProcess, length: int, body: bytes = b"") -> socket.socket:
    host, _, port = front.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), HANG_SECONDS)
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {length}\r\n\r\n".encode() + body)
    return connection


def answer_to(connection: socket.socket) -> tuple[bytes, dict[str, Any]]:
    data = b""
    with connection:
        while b"}}" not in data:
            data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    return head, msgspec.json.decode(body)["error"]


def test_what_no_target_takes_is_refused_by_its_length(front: GatewayProcess) -> None:
    """Nothing of it was sent."""
    head, error = answer_to(post(front, 6 * TAKEN + 1))
    assert b" 413 " in head
    assert error["code"] == "request_too_large"


def test_what_a_target_would_refuse_is_not_sent_to_it(front: GatewayProcess) -> None:
    body = body_of(prompt="a" * (TAKEN + 1))
    head, error = answer_to(post(front, len(body), body))
    assert b" 413 " in head
    assert error["param"] == "prompt"
    assert f"which takes {TAKEN}" in error["message"]
