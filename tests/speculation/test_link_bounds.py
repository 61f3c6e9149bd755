"""An endpoint costs a target a bounded share of its time, and a round a bounded wait.

What a look-up finds, and how long it is waited for, is counted.

Time is the test's own, so nothing here depends on the machine's pace.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import ssd_target.speculation
from ssd_engine.sampling.params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from ssd_engine.speculation.frames import (
    Branch,
    Branches,
    Close,
    NoticeKind,
    Open,
    TargetFrame,
    Verification,
)
from ssd_engine.text.completion import StopRules
from ssd_engine.tracing.histogram import EDGES, cumulative
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
from ssd_target.records.speculation_stats import FALLBACKS, LookUp, SpeculationStats
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import RoundOutcome
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.sequence_speculation import SequenceSpeculation
from ssd_target.speculation.endpoints.session import EndpointSession
from ssd_target.speculation.off import PlainDecoding
from tests.speculation.hostile_draft import SCRIPTS, HostileDraft
from tests.waiting import wait_until_async

LINK, EPOCH = 3, 2
WAIT_SECONDS, LINK_TIMEOUT = 0.25, 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("share", "seconds"), [(SHARE, 1000), (2 * SHARE, BURST / SHARE)], ids=["its share", "more"]
)
def test_on_average_an_endpoint_may_take_its_share(share: float, seconds: float) -> None:
    """And a burst at once, which is used up then."""
    clock = Clock()
    allowance = TimeAllowance(clock)
    while clock.now < 1000 and allowance.spend(share):
        clock.now += 1.0
    assert clock.now == pytest.approx(seconds, abs=2)
    assert allowance.spend(BURST) is (share == SHARE)
    assert not allowance.spend(BURST)


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


# What a look-up is counted as, why rounds go without one, and how waits are counted


def pushed(number: int, *tokens: int) -> Branches:
    return Branches(1, number, [Branch(0, 7, 0, list(tokens))])


def second_round() -> EndpointSession:
    """Round 0 is over, round 1 is decided as (0, 7)."""
    rounds = EndpointSession(100, 5)
    rounds.launch_open(0, LINK, EPOCH)
    rounds.outcome(0, 1)
    rounds.launch(0)
    return rounds


def look_up(rounds: EndpointSession) -> LookUp:
    return rounds.look_up(0, 7, 2)


@pytest.mark.parametrize(
    ("link", "epoch", "number"), [(LINK, EPOCH, 0), (LINK, EPOCH - 1, 1), (LINK + 1, EPOCH, 1)]
)
def test_only_what_is_over_was_there(link: int, epoch: int, number: int) -> None:
    rounds = second_round()
    assert rounds.push(link, epoch, pushed(number, 8, 9)) == 1
    assert look_up(rounds) is LookUp.STALE
    rounds.push(LINK, EPOCH, pushed(1, 8, 9))
    assert look_up(rounds) is LookUp.HIT


def test_nothing_at_all_is_late_not_stale() -> None:
    rounds = second_round()
    rounds.push(LINK, EPOCH, Branches(1, 0, []))  # a sign of life
    rounds.push(LINK, EPOCH, pushed(2, 8))  # of a round that nobody launched
    assert look_up(rounds) is LookUp.LATE
    rounds.push(LINK, EPOCH, pushed(0, 8))
    rounds.outcome(0, 7)
    rounds.launch(0)
    assert look_up(rounds) is LookUp.LATE  # what was stale then is not now


def test_an_endpoint_without_room_is_not_one_that_is_away() -> None:
    sequence = Sequence(1, [1, 2], [], SamplingParams(seed=1), StopRules(9), None, [b""] * 100)
    request = SpeculationRequest(mode=Mode.SSD)
    state = SequenceSpeculation(sequence, request, PlainDecoding(), EndpointSession(100, 5))
    endpoints = DraftEndpoints(SpeculationOptions(), {1: state})
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "disconnected"
    endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, max_context=3, max_depth=5))
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "no room"
    endpoints.disconnected(LINK, EPOCH)
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "disconnected"


# A literal that is passed on as the reason, or is noted as one.
REASON = re.compile(
    r'(?:(?:fell_back|leave|release|disconnected)\([^"()]*?|why_detached = )"([a-z: ]+)"'
)


def test_every_reason_is_a_known_one() -> None:
    """Those that are not would be missing from the metrics."""
    folder = Path(ssd_target.speculation.__file__).parent
    sources = "".join(file.read_text() for file in folder.rglob("*.py"))
    given = set(REASON.findall(sources))
    given |= {kind.name.lower() for kind in NoticeKind}
    assert given >= {"stalled", "does not pay", "no room", "no distributions", "busy"}
    assert given - {"closed"} <= set(FALLBACKS)  # closed: at its end, when no round follows


def test_waits_are_counted_by_their_length_and_add_up() -> None:
    one, two = SpeculationStats(), SpeculationStats()
    for seconds in (0.0004, 0.02, 99.0):
        one.waited(seconds)
    two.waited(0.02)
    two.add(one)
    shown = dict(cumulative(two.waits, at_once=6))
    assert shown["0.0"] == 6
    assert shown["0.0005"] == 7
    assert (shown["0.01"], shown["0.025"]) == (7, 9)
    assert (shown["10.0"], shown["+Inf"]) == (9, 10)
    assert two.wait_micros == 99_040_400
    assert dict(cumulative([])) == dict.fromkeys(["0.0", *map(str, EDGES), "+Inf"], 0)
