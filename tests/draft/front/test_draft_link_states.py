"""The life of a link: every pair of state and event, and what it lets pass."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_draft.front.link import (
    TRANSITIONS,
    Outbox,
    TargetLink,
    TargetLinkEvent,
    TargetLinkState,
    Window,
    transition,
)
from ssd_engine.errors import SSDError
from ssd_engine.speculation.frames import Branch, Branches, DraftFrame, Notice, NoticeKind
from tests.suite.scale import share

S, E = TargetLinkState, TargetLinkEvent


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def branches(sequence: int, tokens: int = 1) -> Branches:
    return Branches(sequence, 1, [Branch(0, 5, 0, [7] * tokens)])


def notice(sequence: int) -> Notice:
    return Notice(sequence, 1, NoticeKind.LOST, "gone")


class TestStates:
    @pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
    def test_every_pair_is_a_transition_or_an_error(self, state: S, event: E) -> None:
        if (state, event) in TRANSITIONS:
            assert transition(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(RuntimeError, match=f"{state.value} cannot {event.value}"):
                transition(state, event)

    def test_a_link_comes_up_once_and_ends_once(self) -> None:
        """All walks: each has one end, none comes up after it, and all states are reached."""
        walks = [[S.GREETING]]
        for walk in walks:
            walks += [[*walk, after] for (before, _), after in TRANSITIONS.items()
                      if before is walk[-1]]  # fmt: skip
        assert {walk[-1] for walk in walks} == set(S)
        finished = [walk for walk in walks if walk[-1] is S.ENDED]
        assert finished
        for walk in walks:
            assert len(set(walk)) == len(walk)
            assert S.ENDED not in walk[:-1]

    def test_every_live_state_can_end(self) -> None:
        for state in set(S) - {S.ENDED}:
            assert transition(state, E.END) is S.ENDED

    def test_the_first_failure_counts(self) -> None:
        async def work() -> None:
            link = TargetLink(1, 10, 10)
            link.fail(SSDError("first"))
            link.fail(SSDError("second"))
            assert str(link.failure.result()) == "first"

        run(work())


async def has_room(window: Window) -> bool:
    waiting = asyncio.ensure_future(window.room())
    await asyncio.sleep(0)  # it has looked
    return waiting.done() or not waiting.cancel()


class TestWindow:
    def test_it_closes_at_its_bound_of_frames_and_opens_below(self) -> None:
        async def work() -> None:
            window = Window(max_frames=4, max_bytes=10**9)
            window.add(3, 10)
            assert await has_room(window)
            window.add(5, 10)
            assert not await has_room(window)
            window.consume(4)
            assert not await has_room(window)
            window.consume(1)
            assert await has_room(window)
            assert window.frames == 3

        run(work())

    def test_it_closes_at_its_bound_of_bytes(self) -> None:
        async def work() -> None:
            window = Window(max_frames=100, max_bytes=1000)
            window.add(2, 999)
            assert await has_room(window)
            window.add(2, 1)
            assert not await has_room(window)
            window.consume(1)  # half of the first message: its bytes are still held
            assert not await has_room(window)
            window.consume(1)
            assert await has_room(window)

        run(work())

    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), max_size=30), st.data())
    @settings(max_examples=share(500), derandomize=True, deadline=None)
    def test_what_went_in_comes_out(
        self, messages: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        async def work() -> None:
            window = Window(max_frames=20, max_bytes=300)
            for frames, size in messages:
                window.add(frames, size)
                window.consume(data.draw(st.integers(0, window.frames)))
            window.consume(window.frames)
            assert window.frames == 0
            assert window._bytes == 0
            assert await has_room(window)

        run(work())


class TestOutbox:
    def test_all_that_has_gathered_is_one_message(self) -> None:
        async def work() -> None:
            outbox = Outbox(100)
            frames: list[DraftFrame] = [branches(i) for i in range(50)]
            for frame in frames:
                assert outbox.push([frame]) == 0
            assert await outbox.take() == frames
            more = asyncio.ensure_future(outbox.take())
            await asyncio.sleep(0)
            assert more.cancel()  # it waits

        run(work())

    def test_a_message_has_a_largest_size_and_none_is_lost_over_it(self) -> None:
        async def work() -> None:
            outbox = Outbox(100)
            outbox.push([branches(i, tokens=30_000) for i in range(10)])
            pieces = []
            while len(outbox):
                pieces.append(await outbox.take())
            assert len(pieces) > 1
            assert [f.sequence for piece in pieces for f in piece] == list(range(10))

        run(work())

    def test_the_oldest_branches_go_first_and_notices_stay(self) -> None:
        async def work() -> None:
            outbox = Outbox(3)
            assert outbox.push([branches(0), notice(1), branches(2)]) == 0
            assert outbox.push([branches(3), notice(4)]) == 2
            assert [f.sequence for f in await outbox.take()] == [1, 3, 4]
            assert not outbox.overfull

        run(work())

    def test_notices_alone_can_be_too_many(self) -> None:
        async def work() -> None:
            outbox = Outbox(3)
            assert outbox.push([branches(0), *(notice(i) for i in range(4))]) == 1
            assert outbox.overfull

        run(work())
