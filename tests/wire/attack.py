"""Calls as an attacker makes them, many at a time, and what became of them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from hypothesis import strategies as st

from tests.wire.messages import requests
from tests.wire.rpcs import Rpc

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


@dataclass(frozen=True)
class CallEnd:
    call: Call
    code: str
    details: str

    @property
    def is_wrong(self) -> bool:
        return self.code in WRONG and self.details != NEVER_SENT


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


def shown(ends: Sequence[CallEnd]) -> str:
    """By method and status."""
    lines = Counter((end.call.rpc.path, end.code) for end in ends)
    return "\n".join(f"  {path}: {code} {n}" for (path, code), n in sorted(lines.items()))


async def attack(address: str, calls: Sequence[Call]) -> list[CallEnd]:
    """Many of them at a time."""
    room = asyncio.Semaphore(IN_FLIGHT)
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    options = [*limits, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:

        async def one(call: Call) -> CallEnd:
            async with room:
                return await _end_of(channel, call)

        return await asyncio.gather(*map(one, calls))


async def _end_of(channel: grpc.aio.Channel, call: Call) -> CallEnd:
    """Unary or not, on the wire all methods are streams."""
    stream = channel.stream_stream(call.rpc.path)(
        _sent(call),
        timeout=call.timeout,
        metadata=grpc.aio.Metadata(*call.metadata),
        compression=grpc.Compression.Gzip if call.compressed else None,
    )
    if call.cancel_after is not None:
        asyncio.get_running_loop().call_later(call.cancel_after, stream.cancel)
    try:
        async with asyncio.timeout(call.timeout + SLACK_SECONDS):
            count = 0
            async for _ in stream:
                count += 1
                if count == MOST_RESPONSES:
                    stream.cancel()
    except grpc.aio.AioRpcError as error:
        return CallEnd(call, error.code().name, error.details() or "")
    except TimeoutError:
        return CallEnd(call, "HANG", f"{call.timeout + SLACK_SECONDS:g} s")
    except asyncio.CancelledError:
        if not stream.cancelled():
            raise
        return CallEnd(call, "CANCELLED", "")
    return CallEnd(call, "OK", "")


async def _sent(call: Call) -> AsyncIterator[bytes]:
    for message in call.messages:
        yield message
    if not call.half_close:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(min(call.timeout, 0.3))
