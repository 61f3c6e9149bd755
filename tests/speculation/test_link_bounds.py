"""An endpoint costs a target a bounded share of its time, and a round a bounded wait.

Time is the test's own, so nothing here depends on the machine's pace.
"""

import asyncio
from typing import Any

import pytest

from ssd_engine.sampling.params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from ssd_engine.speculation.frames import Close, Open, TargetFrame, Verification
from ssd_engine.text.completion import StopRules
from ssd_serving.rpc.frame_messages import FRAMES_BYTES, encode_target_frames, largest_message
from ssd_target.links import frame_stream
from ssd_target.links.frame_stream import BURST, SHARE, TimeAllowance, in_messages
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import RoundOutcome
from ssd_target.speculation.coordinator import SpeculationCoordinator
from tests.speculation.hostile_draft import SCRIPTS, HostileDraft
from tests.waiting import wait_until_async

LINK, EPOCH = 3, 2
WAIT_SECONDS, LINK_TIMEOUT = 0.25, 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestAllowance:
    def test_a_burst_is_allowed_once(self) -> None:
        allowance = TimeAllowance(Clock())
        assert allowance.spend(BURST)
        assert not allowance.spend(0.001)

    def test_on_average_an_endpoint_may_take_its_share(self) -> None:
        clock = Clock()
        allowance = TimeAllowance(clock)
        for _ in range(1000):
            clock.now += 1.0
            assert allowance.spend(SHARE)

    def test_more_than_its_share_is_found_out(self) -> None:
        clock = Clock()
        allowance = TimeAllowance(clock)
        spent = 0
        while allowance.spend(2 * SHARE):
            clock.now += 1.0
            spent += 1
        assert spent == pytest.approx(BURST / SHARE, abs=2)


@pytest.mark.parametrize("context", [512, 131_072])
def test_a_draft_takes_every_message_that_a_target_has_to_send(context: int) -> None:
    """However much has gathered: such as all sequences, for a link that comes up again."""
    bias = tuple((2**31 + i, 1.5) for i in range(MAX_LOGIT_BIAS_ENTRIES))
    frames: list[TargetFrame] = [
        Open(
            sequence=number,
            round=7,
            prompt=bytes(2 * context),
            output=bytes(2 * context),
            speculation=[2**31] * 64,
            max_tokens=context,
            sampling=SamplingParams(seed=2**63, logit_bias=bias),
            verification=Verification.COUPLED,
            down_weight=1.0,
            depth=64,
            verify_micros=2**31,
            trace_context="t" * 55,
        )
        for number in range(300 if context == 512 else 30)
    ]
    frames += [Close(number, 7) for number in range(2000)]
    messages = list(in_messages(frames))
    assert [frame for message in messages for frame in message] == frames
    sizes = [encode_target_frames(EPOCH, message).ByteSize() for message in messages]
    assert max(sizes) <= largest_message(context) - FRAMES_BYTES // 2
    assert len(messages) < len(frames) / 10


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("floods")])
def test_an_endpoint_that_floods_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes in which its allowance could fill again."""
    monkeypatch.setattr(frame_stream, "TimeAllowance", lambda: TimeAllowance(Clock()))

    async def work(address: str) -> None:
        told: list[Any] = []
        links = Links((address,), (), (), told.append, lambda: 0)
        links.start(TargetIdentity("target", "abc", 1000, 5, None))
        await wait_until_async(lambda: links.failures()["flood"])
        assert any(isinstance(record, DraftLinkUp) for record in told)
        await wait_until_async(lambda: links.links[0].state is DraftLinkState.REFUSED)
        await links.stop()

    with HostileDraft(SCRIPTS[name]) as draft:
        asyncio.run(work(draft.address))


def test_a_silent_endpoint_costs_each_round_its_wait_until_it_is_given_up() -> None:
    clock = Clock()
    given_up: list[int] = []

    def receive(seconds: float) -> bool:
        clock.now += seconds
        return False

    speculator = SpeculationCoordinator(
        SpeculationOptions(
            backup=Backup.JUST_IN_TIME,
            wait_seconds=WAIT_SECONDS,
            link_timeout=LINK_TIMEOUT,
            auto_off=False,
        ),
        100,
        receive=receive,
        stalled=lambda link, epoch, reason: given_up.append(link),
        clock=clock,
    )
    speculator.endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, 100, 5))
    sequence = Sequence(1, [1, 2], [], SamplingParams(seed=1), StopRules(60), None, [b""] * 100)
    sequence.speculation = SpeculationRequest(mode=Mode.SSD)
    speculator.begin(sequence)
    waits = []
    for _ in range(20):
        sequence.commit(7)
        speculator.end_round(sequence, RoundOutcome(range(0), [7], None), 1)
        begin = clock.now
        speculator.launch(speculator.take([sequence]))
        waits.append(clock.now - begin)
    count = sum(wait > 0 for wait in waits)
    assert waits == [WAIT_SECONDS] * count + [0.0] * (20 - count)
    assert sum(waits) <= LINK_TIMEOUT + WAIT_SECONDS
    assert given_up == [LINK]
