"""Links to endpoints, without an engine: who may be dialled, what is sent, and who is forgotten."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import target_pb2
from ssd_engine.errors import InputError
from ssd_engine.speculation.frames import Close
from ssd_serving.engine.records import LinkGone
from ssd_target.front.speculation_requests import SpeculationTerms
from ssd_target.links import link as link_module
from ssd_target.links.frame_stream import MAX_FRAMES, FrameStream
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import MAX_NAMED
from ssd_target.records.engine_records import DraftLinkDown, DraftLinkUp
from ssd_target.records.speculation_options import Mode
from tests.event_loop import on_event_loop
from tests.target.links.linked import LinkedTarget, linked_pair, linked_target
from tests.waiting import wait_until_async

NOBODY = "127.0.0.1:1"
UP = DraftLinkState.UP


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BACK_OFF", (0.01, 0.05))


def number_of(target: LinkedTarget, address: str) -> int:
    """As for a request that names it."""
    terms = SpeculationTerms((Mode.SSD,), 5, target.links.number_of)
    settled = terms.settle(target_pb2.SpeculationOptions(endpoints=[address]))
    assert settled.links is not None
    return settled.links[0]


def is_allowed(target: LinkedTarget, address: str) -> bool:
    try:
        number_of(target, address)
    except InputError as error:
        return error.field != "speculation.endpoints"
    return True


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
@on_event_loop
async def test_patterns_of_the_operator(pattern: str, address: str, allowed: bool) -> None:
    async with linked_target(allowed=(pattern,)) as target:
        assert is_allowed(target, address) is allowed
        assert len(target.links.links) == allowed


@on_event_loop
async def test_the_operators_own_drafts_are_allowed_and_dialled_once() -> None:
    async with linked_target(NOBODY, NOBODY) as target:
        assert number_of(target, NOBODY) == 0
        assert len(target.links.links) == 1
        assert not is_allowed(target, "127.0.0.1:2")


@on_event_loop
async def test_endpoints_are_no_use_where_none_is_offered() -> None:
    async with linked_target() as target:
        terms = SpeculationTerms((Mode.OFF,), 5, target.links.number_of)
        with pytest.raises(InputError, match=r"speculation\.endpoints"):
            terms.settle(target_pb2.SpeculationOptions(endpoints=[NOBODY]))
        assert terms.settle(target_pb2.SpeculationOptions()).mode is Mode.OFF


@on_event_loop
async def test_where_all_places_are_taken_one_that_is_down_makes_room() -> None:
    """Else whoever names many that are not there would keep others from naming theirs."""
    async with linked_target(NOBODY, allowed=("127.0.0.1:*",)) as target:
        numbers = [number_of(target, f"127.0.0.1:{2 + i}") for i in range(2 * MAX_NAMED)]
        assert len(set(numbers)) == 2 * MAX_NAMED
        await wait_until_async(lambda: set(target.links.links) == {0, *numbers[MAX_NAMED:]})
        assert number_of(target, f"127.0.0.1:{1 + 2 * MAX_NAMED}") == numbers[-1]


@on_event_loop
async def test_those_that_are_up_keep_their_places() -> None:
    async with linked_target(allowed=("*",)) as target:
        for i in range(MAX_NAMED):
            target.links.links[number_of(target, f"draft-{i}:1")].state = UP
        assert not is_allowed(target, "another:1")
        assert len(target.links.links) == MAX_NAMED
        for link in target.links.links.values():
            link.state = DraftLinkState.CONNECTING


@on_event_loop
async def test_one_that_is_down_is_forgotten_unless_it_is_named_again() -> None:
    async with linked_target(NOBODY, allowed=("127.0.0.1:*",)) as target:
        links = target.links.links
        first, kept = (number_of(target, f"127.0.0.1:{port}") for port in (2, 3))
        for _ in range(3):
            target.now += 0.9 * link_module.FORGET_SECONDS
            assert number_of(target, "127.0.0.1:3") == kept
            tried = links[kept].report.failures.total() + 2  # one may have begun before
            await wait_until_async(lambda: links[kept].report.failures.total() >= tried)  # noqa: B023
        await wait_until_async(lambda: set(links) == {0, kept})  # the operator's own stays
        assert [record.link for record in target.records_of(LinkGone)] == [first]
        assert target.links.failures()["unavailable"] > links[kept].report.failures.total()
        assert number_of(target, "127.0.0.1:2") not in (0, first, kept)


@on_event_loop
async def test_what_has_gathered_goes_out_in_messages_of_a_bounded_size() -> None:
    async with linked_pair() as (target, link, draft):
        await wait_until_async(lambda: target.records_of(DraftLinkUp))
        for i in range(100):
            target.links.send(0, link.epoch, [Close(30 * i + j, 0) for j in range(30)])
        target.links.send(0, link.epoch - 1, [Close(10**6, 0)])  # of an epoch that is over
        await wait_until_async(lambda: sum(len(m.frames.frames) for m in draft.messages) >= 3000)
        sizes = [len(message.frames.frames) for message in draft.messages]
        assert max(sizes) <= MAX_FRAMES
        assert len(sizes) < 50
        names = [frame.sequence for message in draft.messages for frame in message.frames.frames]
        assert names == list(range(3000))


@on_event_loop
async def test_a_stream_that_ends_is_opened_again() -> None:
    async with linked_pair() as (target, link, draft):
        for _ in range(5):
            await wait_until_async(lambda: link.state is UP)
            draft.end.set()
            epoch = link.epoch
            while link.state is UP:
                target.links.send(0, epoch, [Close(1, 0)])
                await asyncio.sleep(0)
            draft.end = asyncio.Event()
        await wait_until_async(lambda: link.state is UP)
        assert len(target.records_of(DraftLinkDown)) == 5
        assert target.links.failures().total() == 5


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@on_event_loop
async def test_a_connection_ends_with_its_epoch(no_garbage_collection: None) -> None:
    """Not when the garbage of its call is collected: until then it would stay open."""
    async with linked_pair() as (target, link, draft):
        for epoch in range(1, 9):
            await wait_until_async(lambda: link.state is UP)
            if epoch % 2:
                target.links.stalled(0, link.epoch, "too slow")
            else:
                draft.end.set()
            await wait_until_async(lambda: link.state is not UP)
            draft.end = asyncio.Event()
        await wait_until_async(lambda: link.state is UP)
        await wait_until_async(lambda: connections(link.address) <= 1)


def connections(address: str) -> int:
    """That this process has made to an address, and that are not closed."""
    remote = f":{int(address.rpartition(':')[2]):04X}"
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(row[2].endswith(remote) and row[3] == "01" for row in rows)


@pytest.mark.parametrize(
    ("error", "failure", "said"),
    [
        (KeyError("a name"), "internal", "KeyError('a name')"),
        # Of a stream that has ended while a frame was on its way.
        (asyncio.InvalidStateError("RPC already finished."), "ended", "the stream ended"),
    ],
)
@on_event_loop
async def test_a_link_outlives_an_error_that_nobody_foresaw(
    error: Exception, failure: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in the list, says why it is down, and comes up again."""
    follow, errors, reasons = FrameStream.follow, [error, error], set()

    async def fail_first(stream: FrameStream, call: Any) -> None:
        if errors:
            raise errors.pop()
        await follow(stream, call)

    monkeypatch.setattr(FrameStream, "follow", fail_first)
    async with linked_pair() as (target, link, _):

        def is_steady() -> bool:
            reasons.add(link.report.reason)
            return link.epoch == 3 and link.state is UP

        await wait_until_async(lambda: is_steady() or link.state is DraftLinkState.CLOSED)
        assert target.links.links == {0: link}
        assert target.links.failures() == {failure: 2}
        assert any(said in reason for reason in reasons)
        kinds = [type(record) for record in target.records]
        assert kinds == [DraftLinkUp, DraftLinkDown, DraftLinkUp, DraftLinkDown, DraftLinkUp]
