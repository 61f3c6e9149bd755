"""Endpoints that come and go behind a name or in a file, on real streams over loopback."""

import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

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
from ssd_target.records.engine_records import DraftLinkUp
from tests.event_loop import on_event_loop
from tests.target.links.linked import WelcomingDraft, linked_target
from tests.waiting import wait_until_async

NAME = "drafts.test"


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


async def start_pods(*hosts: str) -> tuple[int, list[WelcomingDraft]]:
    """Each listens on an address of its own, all on one port."""
    pods = [WelcomingDraft(host) for host in hosts]
    port = 0
    for pod in pods:
        port = await pod.start(port)
    return port, pods


@on_event_loop
async def test_pods_that_come_are_used_and_pods_that_go_are_left() -> None:
    port, (first, second, third) = await start_pods("127.0.0.2", "127.0.0.3", "127.0.0.4")
    zone, source = Zone(first.host, second.host), f"dns:///{NAME}:{port}"
    one, two, three = (f"{pod.host}:{port}" for pod in (first, second, third))
    async with linked_target(source, look=zone, trusted=(f"{NAME}:*",)) as target:
        await wait_until_async(lambda: target.is_up(one) and target.is_up(two))
        link = target.to(one)
        assert link is not None
        assert (link.server_name, link.source) == (NAME, source)
        assert link.trusted
        assert not link.named
        # One comes; another is named no more, and is of use as long as it is up.
        zone.hosts = (second.host, third.host)
        await wait_until_async(lambda: target.is_up(three))
        await wait_until_async(lambda: link.left)
        assert target.is_up(one)
        await first.server.stop(None)
        await wait_until_async(lambda: target.to(one) is None)
        assert [record.link for record in target.records_of(LinkGone)] == [link.number]
        # Whoever comes back is somebody new to the engine.
        again = WelcomingDraft(first.host)
        await again.start(port)
        asked = zone.asked
        await wait_until_async(lambda: zone.asked > asked + 2)
        assert (again.streams, first.streams) == (0, 1)  # not dialled: nobody names it
        zone.hosts = (first.host, second.host, third.host)
        await wait_until_async(lambda: target.is_up(one))
        assert len({record.link for record in target.records_of(DraftLinkUp)}) == 4
    for pod in (again, second, third):
        await pod.server.stop(None)


@on_event_loop
async def test_one_that_is_down_and_named_no_more_is_not_dialled_again() -> None:
    zone = Zone("127.0.0.2", "127.0.0.3")
    async with linked_target(f"dns:///{NAME}:1", look=zone) as target:
        await wait_until_async(lambda: target.links.failures()["unavailable"] >= 2)
        assert {link.address for link in target.links.links.values()} == {
            "127.0.0.2:1",
            "127.0.0.3:1",
        }
        zone.hosts = ("127.0.0.3",)
        await wait_until_async(lambda: len(target.links.links) == 1)
        zone.hosts = ()  # a service with nobody behind it
        await wait_until_async(lambda: not target.links.links)
        assert target.links.look_ups()["empty"] >= 1


@on_event_loop
async def test_a_look_up_that_fails_changes_nothing_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ssd_target.links.discovery")
    port, (pod,) = await start_pods("127.0.0.2")
    zone = Zone(pod.host)
    async with linked_target(f"dns:///{NAME}:{port}", look=zone) as target:
        await wait_until_async(lambda: target.is_up(f"{pod.host}:{port}"))
        zone.hosts = None
        await wait_until_async(lambda: target.links.look_ups()["failed"] >= 3)
        assert target.is_up(f"{pod.host}:{port}")
        await pod.server.stop(None)  # and while nothing can be looked up, it is dialled again
        pod = WelcomingDraft(pod.host)
        await pod.start(port)
        await wait_until_async(lambda: pod.streams)
        zone.hosts = (pod.host,)
        found = target.links.look_ups()["found"]
        await wait_until_async(lambda: target.links.look_ups()["found"] > found)
    await pod.server.stop(None)
    said = [record.getMessage() for record in caplog.records]
    assert sum("look-up failed" in line for line in said) == 1
    assert sum("found again" in line for line in said) == 1


@on_event_loop
async def test_a_link_that_fails_makes_its_name_be_looked_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "LEAST_SECONDS", 0.05)
    port, (pod, other) = await start_pods("127.0.0.2", "127.0.0.3")
    zone, source = Zone(pod.host), f"dns:///{NAME}:{port}"
    async with linked_target(source, look=zone, discover_seconds=3600) as target:
        await wait_until_async(lambda: target.records_of(DraftLinkUp))
        assert zone.asked == 1
        zone.hosts = (other.host,)
        await pod.server.stop(None)
        await wait_until_async(
            lambda: (
                [link.address for link in target.links.links.values()] == [f"{other.host}:{port}"]
            )
        )
    await other.server.stop(None)


@on_event_loop
async def test_a_resolver_that_hangs_holds_up_nothing_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "LOOK_UP_SECONDS", 0.05)
    free, asked = threading.Event(), list[Any]()

    def hang(source: Any) -> list[EndpointAddress]:
        asked.append(source)
        free.wait()
        return [at("127.0.0.2:1")]

    async with linked_target(f"dns:///{NAME}:1", look=hang) as target:
        try:
            await wait_until_async(lambda: target.links.look_ups()["failed"] >= 3)
            assert len(asked) == 1
        finally:
            free.set()
        await wait_until_async(lambda: target.links.links)


@on_event_loop
async def test_a_name_has_a_bounded_number_of_addresses_and_keeps_those_in_use() -> None:
    answer = [at(f"10.0.0.{n}:1") for n in range(80)]
    seen: list[set[str]] = []
    discovery = Discovery(
        DnsName(NAME, 1), 1.0, lambda d: seen.append({p.address for p in d.places})
    )
    discovery._take(answer)
    assert len(seen[0]) == MAX_PLACES
    discovery._take(answer[::-1])  # resolvers turn their answers round
    assert seen[1] == seen[0]


@on_event_loop
async def test_a_file_lists_endpoints_beside_those_that_are_named(tmp_path: Path) -> None:
    port, pods = await start_pods("127.0.0.2", "127.0.0.3")
    file = tmp_path / "drafts"
    async with linked_target(f"127.0.0.1:{port}", f"file://{file}") as target:
        await wait_until_async(lambda: target.links.look_ups()["failed"])  # it is not there yet
        file.write_text(f"# pods\n127.0.0.2:{port}  # the first\n\n127.0.0.1:{port}\n")
        await wait_until_async(lambda: target.is_up(f"127.0.0.2:{port}"))
        file.write_text(f"127.0.0.3:{port}\n127.0.0.2:{port}\nnonsense\n")
        failed = target.links.look_ups()["failed"]
        await wait_until_async(lambda: target.links.look_ups()["failed"] > failed)
        assert target.to(f"127.0.0.3:{port}") is None
        file.write_text(f"127.0.0.3:{port}\n")
        await wait_until_async(lambda: target.is_up(f"127.0.0.3:{port}"))
        own = target.to(f"127.0.0.1:{port}")
        assert own is not None  # the operator named it, whatever the file says
        assert (own.source, own.left) == ("", False)
    for pod in pods:
        await pod.server.stop(None)


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
