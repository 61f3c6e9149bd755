"""Links to endpoints, without an engine: who may be dialled, what is sent, and who is forgotten."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.speculation.frames import Close
from ssd_serving.engine.records import LinkGone
from ssd_target.front.speculation_requests import SpeculationTerms
from ssd_target.links import link as link_module
from ssd_target.links.frame_stream import MAX_FRAMES, FrameStream
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import MAX_NAMED, Links
from ssd_target.records.engine_records import DraftLinkDown, DraftLinkUp
from ssd_target.records.speculation_options import Mode
from tests.waiting import wait_until_async

SERVICE = "ssd.v1.SpeculationService"
NOBODY = "127.0.0.1:1"


class Bench:
    """Links whose engine keeps what it is told."""

    def __init__(self, *allowed: str, drafts: tuple[str, ...] = ()) -> None:
        self.told: list[Any] = []
        self.now = 0.0
        self.links = Links(drafts, allowed, (), self.told.append, lambda: 0, clock=lambda: self.now)
        self.links.start(TargetIdentity("target", "abc", 1000, 5, None))

    def number_of(self, address: str) -> int:
        """As for a request that names it."""
        terms = SpeculationTerms((Mode.SSD,), 5, self.links.number_of)
        settled = terms.settle(target_pb2.SpeculationOptions(endpoints=[address]))
        assert settled.links is not None
        return settled.links[0]

    def is_allowed(self, address: str) -> bool:
        try:
            self.number_of(address)
        except InputError as error:
            return error.field != "speculation.endpoints"
        return True


def run(work: Callable[[], Any]) -> None:
    asyncio.run(work())


@pytest.mark.parametrize(
    ("pattern", "address", "allowed"),
    [
        ("draft-1:7420", "draft-1:7420", True),
        ("draft-1:7420", "draft-1:7421", False),
        ("draft-?:7420", "draft-2:7420", True),
        ("draft-?:7420", "draft-22:7420", False),
        ("*.drafts.local:7420", "a.drafts.local:7420", True),
        ("*.drafts.local:7420", "a.drafts.local.example.org:7420", False),
        ("10.0.*:7420", "10.0.3.4:7420", True),
        ("10.0.*:7420", "10.0.example.org:7420", False),
        ("10.0.*:7420", "10.0.3.4.example.org:7420", False),
        ("127.0.0.1:*", "127.0.0.1:80", True),
        ("127.0.0.1:*", "localhost:80", False),
        ("*", "anything:1", True),
        ("*", "unix:1", True),  # a host of this name: no scheme is ever looked at
        ("*", "unix:/tmp/socket", False),
        ("*", "dns:///host:1", False),
        ("*", "[::1]:7420", True),
        ("*", "::1:7420", False),
        ("*", "a%2eb:1", False),
        ("*", "a b:1", False),
    ],
)
def test_patterns_of_the_operator(pattern: str, address: str, allowed: bool) -> None:
    async def work() -> None:
        bench = Bench(pattern)
        assert bench.is_allowed(address) is allowed
        assert len(bench.links.links) == allowed
        await bench.links.stop()

    run(work)


def test_the_operators_own_drafts_are_allowed_and_dialled_once() -> None:
    async def work() -> None:
        bench = Bench(drafts=(NOBODY, NOBODY))
        assert bench.number_of(NOBODY) == 0
        assert len(bench.links.links) == 1
        assert not bench.is_allowed("127.0.0.1:2")
        await bench.links.stop()

    run(work)


def test_endpoints_are_no_use_where_none_is_offered() -> None:
    async def work() -> None:
        bench = Bench()
        terms = SpeculationTerms((Mode.OFF,), 5, bench.links.number_of)
        with pytest.raises(InputError, match=r"speculation\.endpoints"):
            terms.settle(target_pb2.SpeculationOptions(endpoints=[NOBODY]))
        assert terms.settle(target_pb2.SpeculationOptions()).mode is Mode.OFF
        await bench.links.stop()

    run(work)


def test_where_all_places_are_taken_one_that_is_down_makes_room() -> None:
    """Else whoever names many that are not there would keep others from naming theirs."""

    async def work() -> None:
        bench = Bench("127.0.0.1:*", drafts=(NOBODY,))
        numbers = [bench.number_of(f"127.0.0.1:{2 + i}") for i in range(2 * MAX_NAMED)]
        assert len(set(numbers)) == 2 * MAX_NAMED
        await wait_until_async(lambda: len(bench.links.links) == MAX_NAMED + 1)
        assert set(bench.links.links) == {0, *numbers[MAX_NAMED:]}
        assert bench.number_of(f"127.0.0.1:{1 + 2 * MAX_NAMED}") == numbers[-1]
        await bench.links.stop()

    run(work)


def test_those_that_are_up_keep_their_places() -> None:
    async def work() -> None:
        bench = Bench("*")
        for i in range(MAX_NAMED):
            bench.links.links[bench.number_of(f"draft-{i}:1")].state = DraftLinkState.UP
        assert not bench.is_allowed("another:1")
        assert len(bench.links.links) == MAX_NAMED
        for link in bench.links.links.values():
            link.state = DraftLinkState.CONNECTING
        await bench.links.stop()

    run(work)


def test_one_that_is_down_and_not_named_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BACK_OFF", (0.1, 0.1))

    async def work() -> None:
        bench = Bench("127.0.0.1:*", drafts=(NOBODY,))
        first = [bench.number_of(f"127.0.0.1:{2 + i}") for i in range(MAX_NAMED)]
        await wait_until_async(
            lambda: all(link.report.failures for link in bench.links.links.values())
        )
        bench.now += link_module.FORGET_SECONDS + 1
        await wait_until_async(lambda: len(bench.links.links) == 1)  # the operator's own stays
        gone = [record.link for record in bench.told if isinstance(record, LinkGone)]
        assert sorted(gone) == first
        failures = bench.links.failures()["unavailable"]
        assert failures >= MAX_NAMED
        again = bench.number_of("127.0.0.1:2")
        assert again not in first
        assert bench.links.failures()["unavailable"] >= failures
        await bench.links.stop()

    run(work)


def test_one_that_is_named_again_and_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BACK_OFF", (0.01, 0.01))

    async def work() -> None:
        bench = Bench("127.0.0.1:*")
        number = bench.number_of(NOBODY)
        link = bench.links.links[number]
        for _ in range(4):
            bench.now += 0.9 * link_module.FORGET_SECONDS
            assert bench.number_of(NOBODY) == number
            tried = link.report.failures.total() + 2  # one may have begun before
            await wait_until_async(lambda: link.report.failures.total() >= tried)  # noqa: B023
        assert bench.number_of(NOBODY) == number
        await bench.links.stop()

    run(work)


class Endpoint:
    """Welcomes, keeps the messages that come, and ends the stream when it is told to."""

    def __init__(self) -> None:
        self.messages: list[pb.SpeculateRequest] = []
        self.streams = 0
        self.end = asyncio.Event()

    async def speculate(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        hello = (await context.read()).hello
        welcome = pb.Welcome(
            protocol_version=1, epoch=hello.epoch, max_sequences=8, max_context=100, max_depth=5
        )
        await context.write(pb.SpeculateResponse(welcome=welcome))
        reader = asyncio.ensure_future(self._read(context))
        await self.end.wait()
        reader.cancel()

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.messages.append(message)

    async def serve(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(
            self.speculate,
            request_deserializer=pb.SpeculateRequest.FromString,
            response_serializer=pb.SpeculateResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Speculate": method})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"


def test_what_has_gathered_goes_out_in_messages_of_a_bounded_size() -> None:
    async def work() -> None:
        endpoint = Endpoint()
        server, address = await endpoint.serve()
        bench = Bench(drafts=(address,))
        await wait_until_async(
            lambda: any(isinstance(record, DraftLinkUp) for record in bench.told)
        )
        epoch = bench.links.links[0].epoch
        for i in range(100):
            bench.links.send(0, epoch, [Close(30 * i + j, 0) for j in range(30)])
        bench.links.send(0, epoch - 1, [Close(10**6, 0)])  # of an epoch that is over
        await wait_until_async(lambda: sum(len(m.frames.frames) for m in endpoint.messages) >= 3000)
        sizes = [len(message.frames.frames) for message in endpoint.messages]
        assert max(sizes) <= MAX_FRAMES
        assert len(sizes) < 50
        names = [frame.sequence for message in endpoint.messages for frame in message.frames.frames]
        assert names == list(range(3000))
        await bench.links.stop()
        await server.stop(None)

    run(work)


def test_a_stream_that_ends_is_opened_again() -> None:
    async def work() -> None:
        endpoint = Endpoint()
        server, address = await endpoint.serve()
        bench = Bench(drafts=(address,))
        link = bench.links.links[0]
        for _ in range(5):
            await wait_until_async(lambda: link.state is DraftLinkState.UP)
            endpoint.end.set()
            epoch = link.epoch
            while link.state is DraftLinkState.UP:
                bench.links.send(0, epoch, [Close(1, 0)])
                await asyncio.sleep(0)
            endpoint.end = asyncio.Event()
        await wait_until_async(lambda: link.state is DraftLinkState.UP)
        downs = [record for record in bench.told if isinstance(record, DraftLinkDown)]
        assert len(downs) == 5
        assert bench.links.failures().total() == 5
        await bench.links.stop()
        await server.stop(None)

    run(work)


def test_a_connection_ends_with_its_epoch() -> None:
    """Not when the garbage of its call is collected: until then it would stay open."""

    async def work() -> None:
        endpoint = Endpoint()
        server, address = await endpoint.serve()
        bench = Bench(drafts=(address,))
        link = bench.links.links[0]
        for epoch in range(1, 9):
            await wait_until_async(lambda: link.state is DraftLinkState.UP)
            if epoch % 2:
                bench.links.stalled(0, link.epoch, "too slow")
            else:
                endpoint.end.set()
            await wait_until_async(lambda: link.state is not DraftLinkState.UP)
            endpoint.end = asyncio.Event()
            link._pause = 0.05
        await wait_until_async(lambda: link.state is DraftLinkState.UP)
        await wait_until_async(lambda: connections(address) <= 1)
        await bench.links.stop()
        await server.stop(None)

    gc.disable()
    try:
        run(work)
    finally:
        gc.enable()


def connections(address: str) -> int:
    """That this process has made to an address, and that are not closed."""
    remote = f":{int(address.rpartition(':')[2]):04X}"
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(row[2].endswith(remote) and row[3] == "01" for row in rows)


class EndedCall:
    """A stream of which the writer learns first that it is over."""

    def __init__(self) -> None:
        self._hello: pb.Hello | None = None

    async def write(self, message: pb.SpeculateRequest) -> None:
        if self._hello is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._hello = message.hello

    async def read(self) -> bytes:
        if self._hello is None or self._hello.epoch == 0:
            await asyncio.Event().wait()
        assert self._hello is not None
        welcome = pb.Welcome(
            protocol_version=1, epoch=self._hello.epoch, max_sequences=8, max_depth=5
        )
        self._hello = pb.Hello()  # nothing more to read
        return pb.SpeculateResponse(welcome=welcome).SerializeToString()

    def cancel(self) -> None:
        pass


class EndedChannel:
    async def __aenter__(self) -> "EndedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def stream_stream(self, *_: object, **__: object) -> Callable[..., EndedCall]:
        return lambda metadata: EndedCall()


def test_a_stream_that_ends_under_a_frame_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module.DraftLink, "_channel", lambda link: EndedChannel())

    async def work() -> None:
        bench = Bench(drafts=(NOBODY,))
        link = bench.links.links[0]
        for _ in range(2):
            await wait_until_async(lambda: link.state is DraftLinkState.UP)
            bench.links.send(0, link.epoch, [Close(1, 0)])
            await wait_until_async(lambda: link.state is DraftLinkState.WAITING)
        assert bench.links.failures() == {"ended": 2}
        await bench.links.stop()

    run(work)


def test_a_link_outlives_an_error_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the list, says why it is down, and comes up again."""
    follow, errors, reasons = FrameStream.follow, [KeyError("first"), KeyError("second")], set()

    async def fail_first(stream: FrameStream, call: Any) -> None:
        if errors:
            raise errors.pop()
        await follow(stream, call)

    monkeypatch.setattr(FrameStream, "follow", fail_first)

    async def work() -> None:
        server, address = await Endpoint().serve()
        bench = Bench(drafts=(address,))
        link = bench.links.links[0]

        def is_steady() -> bool:
            reasons.add(link.report.reason)
            return link.epoch == 3 and link.state is DraftLinkState.UP

        await wait_until_async(lambda: is_steady() or link.state is DraftLinkState.CLOSED)
        assert bench.links.links == {0: link}
        assert bench.links.failures() == {"internal": 2}
        assert any("KeyError('first')" in reason for reason in reasons)
        kinds = [type(record) for record in bench.told]
        assert kinds == [DraftLinkUp, DraftLinkDown, DraftLinkUp, DraftLinkDown, DraftLinkUp]
        await bench.links.stop()
        await server.stop(None)

    run(work)
