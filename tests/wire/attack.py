"""Calls as an attacker makes them, many at a time, and what became of them."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from hypothesis import strategies as st

from tests.wire.messages import requests
from tests.wire.rpcs import Rpc

SURELY_SENT = 0.5  # seconds in which a call has sent all that it has
SLACK_SECONDS = 150.0  # beyond its deadline a call is a hang, however busy the machine
MOST_RESPONSES = 8  # that are read before the call is given up
IN_FLIGHT = 40  # calls
HOLDING = ("/Generate", "/Speculate")
# What the client's own library says of a call whose deadline passed before it had begun.
NEVER_SENT = "Internal error from Core"
WRONG = ("UNKNOWN", "INTERNAL", "DATA_LOSS", "HANG")

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Call:
    rpc: Rpc
    messages: tuple[bytes, ...]
    timeout: float
    cancel_after: float | None  # seconds
    half_close: bool  # else the stream of requests stays open
    metadata: Metadata
    compressed: bool


_KEYS = ("x", "authorization", "traceparent", "grpc-tags-bin", "x-bin", "x.y_z-0", "baggage")
_VALUES = ("", " ", "Bearer x", "00-0-0-00", "%", "~" * 300, "a" * 20_000)


def _pair(drawn: tuple[str, str, bytes]) -> tuple[str, str | bytes]:
    key, text, data = drawn
    return (key, data) if key.endswith("-bin") else (key, text)


METADATA = st.lists(
    st.tuples(st.sampled_from(_KEYS), st.sampled_from(_VALUES), st.binary(max_size=20)).map(_pair),
    max_size=3,
).map(tuple)


def calls(rpcs: Sequence[Rpc], valid: dict[str, list[bytes]]) -> st.SearchStrategy[Any]:
    """A call of each method; of those that hold something, several."""
    return st.tuples(
        *(
            _calls_of(rpc, valid.get(rpc.request.full_name, []))
            for rpc in rpcs
            for _ in range(3 if rpc.path.endswith(HOLDING) else 1)
        )
    )


def _calls_of(rpc: Rpc, valid: list[bytes]) -> st.SearchStrategy[Call]:
    message = requests(rpc.request, valid)
    if not rpc.streams_requests:
        # Also none at all, or one more than there may be.
        messages = st.one_of(message.map(lambda m: (m,)), st.sampled_from([(), (b"", b"")]))
    else:
        honest = st.integers(0, len(valid)).map(lambda n: tuple(valid[:n]))
        others = st.lists(message, max_size=4).map(tuple)
        messages = st.one_of(
            st.tuples(honest, others).map(lambda pair: pair[0] + pair[1]),
            others,
        )
    return st.builds(
        Call,
        rpc=st.just(rpc),
        messages=messages,
        timeout=st.sampled_from([1e-3, 0.02, *[0.5] * 8, 1.0, 2.0]),
        cancel_after=st.sampled_from([*[None] * 8, 0.0, 0.005]),
        half_close=st.sampled_from([True, True, True, False] if rpc.streams_requests else [True]),
        metadata=METADATA,
        compressed=st.sampled_from([False, False, False, True]),
    )


@dataclass
class Tally:
    """What became of the calls: by method and status; and malformed or extreme messages that were
    sent, by method."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, Any]] = field(default_factory=list)

    def add(self, path: str, messages: int, code: str, details: str, call: Any) -> None:
        self.ends[path, code] += 1
        self.messages[path] += messages
        if code in WRONG:
            self.wrong.append((code, details, call))

    def __str__(self) -> str:
        lines = [f"{sum(self.messages.values())} messages in {sum(self.ends.values())} calls"]
        for path in sorted(self.messages):
            codes = sorted((code, n) for (p, code), n in self.ends.items() if p == path)
            text = ", ".join(f"{code} {n}" for code, n in codes)
            lines.append(f"  {path}: {self.messages[path]} messages; {text}")
        return "\n".join(lines)


class Attacker:
    """An event loop on a thread, with a few connections to a process."""

    def __init__(
        self, address: str, valid: frozenset[bytes] = frozenset(), connections: int = 2
    ) -> None:
        """``valid``: messages that an honest client sends; they do not count."""
        self._address = address
        self._valid = valid
        self._count = connections
        self.tally = Tally()
        self._room = threading.Semaphore(IN_FLIGHT)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Attacker":
        self._thread.start()
        self._channels = [self._run(self._connect(i)) for i in range(self._count)]
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            self._run(channel.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, number: int) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self._address,
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
                ("attacker", number),
            ],
        )

    def attack(self, calls: Sequence[Call]) -> None:
        """Begin them, as soon as there is room among those that are under way."""
        for call in calls:
            self._room.acquire()
            asyncio.run_coroutine_threadsafe(self._one(call), self._loop)

    def finish(self) -> None:
        for _ in range(IN_FLIGHT):
            self._room.acquire()
        self._room.release(IN_FLIGHT)

    async def _one(self, call: Call) -> None:
        channel = self._channels[len(self.tally.ends) % self._count]
        try:
            async with asyncio.timeout(call.timeout + SLACK_SECONDS):
                code, details = await _end_of(channel, call)
        except TimeoutError:
            code, details = "HANG", f"{call.timeout + SLACK_SECONDS:g} s"
        except Exception as error:
            code, details = "UNKNOWN", f"the attacker failed: {error!r}"
        messages = sum(message not in self._valid for message in call.messages)
        if details == NEVER_SENT:
            code, messages = "NEVER_SENT", 0
        if call.cancel_after is not None or call.timeout < SURELY_SENT:
            messages = min(1, messages)  # it may not have come to more
        self.tally.add(call.rpc.path, messages, code, details, call)
        self._room.release()


async def _end_of(channel: grpc.aio.Channel, call: Call) -> tuple[str, str]:
    """Status and its text; unary or not, on the wire all methods are streams."""
    stream = channel.stream_stream(call.rpc.path)(
        _sent(call),
        timeout=call.timeout,
        metadata=grpc.aio.Metadata(*call.metadata),
        compression=grpc.Compression.Gzip if call.compressed else None,
    )
    giving_up = _cancel_later(stream, call.cancel_after)
    try:
        count = 0
        async for _ in stream:
            count += 1
            if count == MOST_RESPONSES:
                stream.cancel()
        return "OK", ""
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    except asyncio.CancelledError:
        if not stream.cancelled():
            raise
        return "CANCELLED", ""
    finally:
        giving_up.cancel()


def _cancel_later(stream: Any, seconds: float | None) -> asyncio.TimerHandle:
    loop = asyncio.get_running_loop()
    if seconds is None:
        return loop.call_later(3600, lambda: None)
    return loop.call_later(seconds, stream.cancel)


async def _sent(call: Call) -> AsyncIterator[bytes]:
    for message in call.messages:
        yield message
    if not call.half_close:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(min(call.timeout, 0.3))
