"""Large bodies are read in a process of their own: whoever reads JSON holds Python's lock, and
all streams of the gateway would stand still meanwhile."""

import asyncio
import heapq
import itertools
import pickle
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from ssd_engine.process.sparse_log import SparseLog
from ssd_gateway.http.errors import SERVER, ApiError
from ssd_gateway.reading.prepared import Asked, Prepare, Prepared, Terms

JOB = struct.Struct("<QQ")  # sizes of what to do, and of the body
RESULT = struct.Struct("<Q")
SECONDS = 30.0  # for one body; it takes about one
BUFFER = 1 << 20
_sparse = SparseLog()


class ReadingProcess:
    """Reads one body at a time, the smallest first. Its process is begun for the first one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_busy = False

    async def prepare(
        self,
        how: Prepare[Asked],
        body: bytes,
        terms: Terms,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Prepared[Asked]:
        """``is_gone``: the caller, for whom nothing is read any more."""
        async with self._turn(len(body)):
            if is_gone():
                raise ApiError(499, "the caller has gone")
            result = await self._ask(how, body, terms)
        if isinstance(result, ApiError):
            raise result
        prepared: Prepared[Asked] = result
        return prepared

    @asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), mine))
        self._begin_next()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self._is_busy = False
            mine.cancel()
            self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting and not self._is_busy:
            mine = heapq.heappop(self._waiting)[2]
            if not mine.done():
                self._is_busy = True
                mine.set_result(None)

    async def _ask(self, how: Prepare[Any], body: bytes, terms: Terms) -> Any:
        process, is_over = await self._begun(), False
        try:
            async with asyncio.timeout(SECONDS):
                result = await _exchange(process, pickle.dumps((how, terms)), body)
            is_over = True
            return pickle.loads(result)
        except (OSError, EOFError):  # it took too long, or was killed for what it takes
            return ApiError(
                413,
                "the body takes too long to read, or too much memory; make it shorter",
                code="request_too_large",
            )
        finally:
            if not is_over:  # its result would be taken for that of the next one
                self._kill()

    async def _begun(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            try:
                self._process = await _start()
            except OSError as error:
                _sparse.warning("start", f"no process for large bodies could be begun: {error}")
                about = "large bodies cannot be read now; try again"
                raise ApiError(503, about, SERVER, code="overloaded", retry_after=1) from None
        return self._process

    def _kill(self) -> Process | None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        return process

    async def close(self) -> None:
        process = self._kill()
        if process is not None:
            await process.wait()


async def _exchange(process: Process, job: bytes, body: bytes) -> bytes:
    jobs = cast(asyncio.StreamWriter, process.stdin)
    results = cast(asyncio.StreamReader, process.stdout)
    jobs.write(JOB.pack(len(job), len(body)) + job)
    jobs.write(body)
    await jobs.drain()
    (size,) = RESULT.unpack(await results.readexactly(RESULT.size))
    return await results.readexactly(size)


async def _start() -> Process:
    command = (sys.executable, "-m", "ssd_gateway.reading.worker")
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=BUFFER)
