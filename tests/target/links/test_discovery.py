"""Endpoints that come and go behind a name or in a file, on real streams over loopback."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import ConfigError
from ssd_serving.engine.records import LinkGone
from ssd_target.links import discovery as discovery_module
from ssd_target.links.discovery import MAX_PLACES, Discovery, look_up
from ssd_target.links.endpoint_addresses import (
    AddressFile,
    DnsName,
    EndpointAddress,
    at,
    parse_draft,
    parse_lines,
)
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link import DraftLink
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links
from ssd_target.records.engine_records import DraftLinkUp
from tests.waiting import wait_until_async

NAME = "drafts.test"


def run(work: Callable[[], Any]) -> None:
    asyncio.run(work())


class Pod:
    """Welcomes whoever comes, on an address of its own; ``leave`` ends its streams and itself."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.streams = 0
        self._server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(
            self._speculate,
            request_deserializer=pb.SpeculateRequest.FromString,
            response_serializer=pb.SpeculateResponse.SerializeToString,
        )
        service = "ssd.v1.SpeculationService"
        handlers = grpc.method_handlers_generic_handler(service, {"Speculate": method})
        self._server.add_generic_rpc_handlers((handlers,))

    async def _speculate(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        hello = (await context.read()).hello
        welcome = pb.Welcome(
            protocol_version=1, epoch=hello.epoch, max_sequences=8, max_context=100, max_depth=5
        )
        await context.write(pb.SpeculateResponse(welcome=welcome))
        await asyncio.Event().wait()

    async def start(self, port: int = 0) -> int:
        port = self._server.add_insecure_port(f"{self.host}:{port}")
        await self._server.start()
        return port

    async def leave(self) -> None:
        await self._server.stop(None)


class Zone:
    """A resolver whose answer can be changed; None: it fails."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: tuple[str, ...] | None = hosts
        self.asked = 0

    def __call__(self, source: Any) -> list[EndpointAddress]:
        assert isinstance(source, DnsName)
        self.asked += 1
        if self.hosts is None:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [EndpointAddress(f"{host}:{source.port}", source.name) for host in self.hosts]


class Bench:
    def __init__(
        self, drafts: list[str], look: Any = look_up, trusted: tuple[str, ...] = ()
    ) -> None:
        self.told: list[Any] = []
        self.links = Links(drafts, (), trusted, self.told.append, lambda: 0, None, 0.1, look)
        self.links.start(TargetIdentity("target", "abc", 1000, 5, None))

    def of(self, address: str) -> DraftLink | None:
        found = [link for link in self.links.links.values() if link.address == address]
        return found[-1] if found else None

    def is_up(self, address: str) -> bool:
        link = self.of(address)
        return link is not None and link.state is DraftLinkState.UP

    def numbers_up(self) -> list[int]:
        return [record.link for record in self.told if isinstance(record, DraftLinkUp)]


def test_pods_that_come_are_used_and_pods_that_go_are_left() -> None:
    async def work() -> None:
        first, second, third = (Pod(f"127.0.0.{n}") for n in (2, 3, 4))
        port = await first.start()
        await second.start(port)
        zone = Zone(first.host, second.host)
        bench = Bench([f"dns:///{NAME}:{port}"], zone, trusted=(f"{NAME}:*",))
        one, two, three = (f"{pod.host}:{port}" for pod in (first, second, third))
        await wait_until_async(lambda: bench.is_up(one) and bench.is_up(two))
        link = bench.of(one)
        assert link is not None
        assert (link.server_name, link.source) == (NAME, f"dns:///{NAME}:{port}")
        assert link.trusted
        assert not link.named
        # One comes; another is named no more, and is of use as long as it is up.
        await third.start(port)
        zone.hosts = (second.host, third.host)
        await wait_until_async(lambda: bench.is_up(three))
        await wait_until_async(lambda: link.left)
        assert bench.is_up(one)
        before = first.streams
        await first.leave()
        await wait_until_async(lambda: bench.of(one) is None)
        assert [r.link for r in bench.told if isinstance(r, LinkGone)] == [link.number]
        # Whoever comes back is somebody new to the engine.
        again = Pod("127.0.0.2")
        await again.start(port)
        asked = zone.asked
        await wait_until_async(lambda: zone.asked > asked + 2)
        assert (again.streams, first.streams) == (0, before)  # not dialled: nobody names it
        zone.hosts = (first.host, second.host, third.host)
        await wait_until_async(lambda: bench.is_up(one))
        assert len(set(bench.numbers_up())) == 4
        await bench.links.stop()
        for pod in (again, second, third):
            await pod.leave()

    run(work)


def test_one_that_is_down_and_named_no_more_is_not_dialled_again() -> None:
    async def work() -> None:
        zone = Zone("127.0.0.2", "127.0.0.3")
        bench = Bench([f"dns:///{NAME}:1"], zone)
        await wait_until_async(lambda: bench.links.failures()["unavailable"] >= 2)
        assert {link.address for link in bench.links.links.values()} == {
            "127.0.0.2:1",
            "127.0.0.3:1",
        }
        zone.hosts = ("127.0.0.3",)
        await wait_until_async(lambda: len(bench.links.links) == 1)
        zone.hosts = ()  # a service with nobody behind it
        await wait_until_async(lambda: not bench.links.links)
        assert bench.links.look_ups()["empty"] >= 1
        await bench.links.stop()

    run(work)


def test_a_look_up_that_fails_changes_nothing_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        pod = Pod("127.0.0.2")
        port = await pod.start()
        zone = Zone(pod.host)
        bench = Bench([f"dns:///{NAME}:{port}"], zone)
        await wait_until_async(lambda: bench.is_up(f"{pod.host}:{port}"))
        zone.hosts = None
        await wait_until_async(lambda: bench.links.look_ups()["failed"] >= 3)
        assert bench.is_up(f"{pod.host}:{port}")
        await pod.leave()  # and while nothing can be looked up, it is dialled again
        pod = Pod(pod.host)
        await pod.start(port)
        await wait_until_async(lambda: pod.streams)
        zone.hosts = (pod.host,)
        found = bench.links.look_ups()["found"]
        await wait_until_async(lambda: bench.links.look_ups()["found"] > found)
        await bench.links.stop()
        await pod.leave()

    with caplog.at_level(logging.INFO, "ssd_target.links.discovery"):
        run(work)
    said = [record.getMessage() for record in caplog.records]
    assert sum("look-up failed" in line for line in said) == 1
    assert sum("found again" in line for line in said) == 1


def test_a_link_that_fails_makes_its_name_be_looked_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "LEAST_SECONDS", 0.05)

    async def work() -> None:
        pod, other = Pod("127.0.0.2"), Pod("127.0.0.3")
        port = await pod.start()
        await other.start(port)
        zone = Zone(pod.host)
        told: list[Any] = []
        links = Links([f"dns:///{NAME}:{port}"], (), (), told.append, lambda: 0, None, 3600, zone)
        links.start(TargetIdentity("target", "abc", 1000, 5, None))
        await wait_until_async(lambda: any(isinstance(each, DraftLinkUp) for each in told))
        assert zone.asked == 1
        zone.hosts = (other.host,)
        await pod.leave()
        await wait_until_async(
            lambda: [link.address for link in links.links.values()] == [f"{other.host}:{port}"]
        )
        await links.stop()
        await other.leave()

    run(work)


def test_a_resolver_that_hangs_holds_up_nothing_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "LOOK_UP_SECONDS", 0.05)
    free, asked = threading.Event(), []

    def hang(source: Any) -> list[EndpointAddress]:
        asked.append(source)
        free.wait()
        return [at("127.0.0.2:1")]

    async def work() -> None:
        bench = Bench([f"dns:///{NAME}:1"], hang)
        await wait_until_async(lambda: bench.links.look_ups()["failed"] >= 3)
        assert len(asked) == 1
        free.set()
        await wait_until_async(lambda: bench.links.links)
        await bench.links.stop()

    try:
        run(work)
    finally:
        free.set()


def test_a_name_has_a_bounded_number_of_addresses_and_keeps_those_in_use() -> None:
    async def work() -> None:
        answer = [at(f"10.0.0.{n}:1") for n in range(80)]
        seen: list[set[str]] = []
        discovery = Discovery(
            DnsName(NAME, 1), 1.0, lambda d: seen.append({p.address for p in d.places})
        )
        discovery._take(answer)
        assert len(seen[0]) == MAX_PLACES
        discovery._take(answer[::-1])  # resolvers turn their answers round
        assert seen[1] == seen[0]

    run(work)


def test_a_file_lists_endpoints_beside_those_that_are_named(tmp_path: Path) -> None:
    async def work() -> None:
        first, second = Pod("127.0.0.2"), Pod("127.0.0.3")
        port = await first.start()
        await second.start(port)
        file = tmp_path / "drafts"
        bench = Bench([f"127.0.0.1:{port}", f"file://{file}"])
        await wait_until_async(lambda: bench.links.look_ups()["failed"])  # it is not there yet
        file.write_text(f"# pods\n127.0.0.2:{port}  # the first\n\n127.0.0.1:{port}\n")
        await wait_until_async(lambda: bench.is_up(f"127.0.0.2:{port}"))
        file.write_text(f"127.0.0.3:{port}\n127.0.0.2:{port}\nnonsense\n")
        failed = bench.links.look_ups()["failed"]
        await wait_until_async(lambda: bench.links.look_ups()["failed"] > failed)
        assert bench.of(f"127.0.0.3:{port}") is None
        file.write_text(f"127.0.0.3:{port}\n")
        await wait_until_async(lambda: bench.is_up(f"127.0.0.3:{port}"))
        own = bench.of(f"127.0.0.1:{port}")
        assert own is not None  # the operator named it, whatever the file says
        assert (own.source, own.left) == ("", False)
        await bench.links.stop()
        await first.leave()
        await second.leave()

    run(work)


def test_the_resolver_of_the_system_is_asked() -> None:
    places = look_up(DnsName("localhost", 7420))
    assert "127.0.0.1:7420" in {place.address for place in places}
    assert {place.server_name for place in places} == {"localhost"}
    assert look_up(DnsName("::1", 7420)) == [EndpointAddress("[::1]:7420", "[::1]:7420")]


@pytest.mark.parametrize(
    "text", ["dns:///drafts", "dns:///drafts:0", "dns:drafts:1", "http://a:1", "dns://8.8.8.8/a:1"]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--draft: "):
        parse_draft(text)


def test_places_are_read_as_they_are_written() -> None:
    assert parse_draft("a:1") == EndpointAddress("a:1", "a:1")
    assert parse_draft("dns:///a.b:1") == DnsName("a.b", 1)
    assert parse_draft("file:///etc/drafts") == AddressFile(Path("/etc/drafts"))
    assert str(parse_draft("file:///etc/drafts")) == "file:///etc/drafts"
    assert parse_lines("a:1\n[::1]:2 # b\n\n#c\na:1") == ["a:1", "[::1]:2"]
    for bad in ("a", "a:0", "dns:///a:1", "a b:1"):
        with pytest.raises(ConfigError, match="line 1 is not HOST:PORT"):
            parse_lines(bad)
