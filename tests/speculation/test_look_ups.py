"""What a look-up is counted as, why rounds go without one, and how waits are counted."""

import ast
from pathlib import Path

import pytest

import ssd_target.speculation
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import (
    Branch,
    Branches,
    DraftFrame,
    Notice,
    NoticeKind,
    Open,
    Verification,
)
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_engine.tracing.histogram import EDGES, cumulative
from ssd_serving.rpc.frame_messages import encode_target_frames
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

LINK, EPOCH = 3, 2
GIVEN_TO = {"fell_back", "leave", "release", "disconnected"}


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


def endpoints_and_sequence() -> tuple[DraftEndpoints, SequenceSpeculation]:
    sequence = Sequence(1, [1, 2], [], SamplingParams(seed=1), StopRules(9), None, [b""] * 100)
    request = SpeculationRequest(mode=Mode.SSD)
    state = SequenceSpeculation(sequence, request, PlainDecoding(), EndpointSession(100, 5))
    endpoints = DraftEndpoints(SpeculationOptions(), {1: state})
    return endpoints, state


def test_frames_of_an_epoch_that_is_over_are_noted() -> None:
    endpoints, state = endpoints_and_sequence()
    endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, 100, 5))
    state.session.launch_open(0, LINK, EPOCH)
    endpoints.follow(LINK, EPOCH - 1, [pushed(0, 8, 9)], None)
    assert endpoints.dropped == 1
    assert look_up(state.session) is LookUp.STALE


def test_an_endpoint_without_room_is_not_one_that_is_away() -> None:
    endpoints, state = endpoints_and_sequence()
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "disconnected"
    endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, max_context=3, max_depth=5))
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "no room"
    endpoints.disconnected(LINK, EPOCH)
    assert endpoints.choose(state, 0) is None
    assert state.why_detached == "disconnected"


LEAVING = Notice(0, 0, NoticeKind.LEAVING, "drains")


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_leaves_costs_a_round_only_if_nobody_waited_for_it(waits: bool) -> None:
    """Its sequence is opened elsewhere with the next launch; a round that is looked up until then
    goes without."""
    said: list[list[DraftFrame]] = []

    def receive(seconds: float) -> bool:
        if said and (seconds > 0) is waits:
            speculator.endpoints.follow(LINK, EPOCH, said.pop(), None)
            return True
        return False

    options = SpeculationOptions(backup=Backup.JUST_IN_TIME, wait_seconds=9.0)
    speculator = SpeculationCoordinator(options, 100, receive=receive)
    speculator.endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, 100, 5))
    sequence = Sequence(1, [1, 2], [], SamplingParams(seed=1), StopRules(9), None, [b""] * 100)
    sequence.speculation = SpeculationRequest(mode=Mode.SSD)
    speculator.begin(sequence)
    speculator.endpoints.connected(DraftLinkUp(LINK + 1, EPOCH, False, 4, 100, 5))
    sequence.commit(7)
    speculator.end_round(sequence, RoundOutcome(range(0), [7], None), 1)
    said.append([LEAVING])
    if not waits:
        speculator.listen()
    rows = speculator.take([sequence])
    speculator.launch(rows)
    assert not said
    assert [each.link for each in speculator.endpoints if each.sequences] == [LINK + 1]
    speculator.check_integrity()
    stats = speculator.end(sequence.id)
    assert stats is not None
    assert stats.fallbacks == ({} if waits else {"leaving": 1})
    assert stats.late == waits


def reasons(source: str) -> set[str]:
    """Literals that a file gives as a reason."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in GIVEN_TO:
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Assign) and _is_reason(node.targets[0]):
            found |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
    return found


def _is_reason(target: ast.expr) -> bool:
    return getattr(target, "attr", "") == "why_detached"


def test_every_reason_is_a_known_one() -> None:
    """Those that are not would be missing from the metrics."""
    folder = Path(ssd_target.speculation.__file__).parent
    given = set().union(*(reasons(file.read_text()) for file in folder.rglob("*.py")))
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


def test_an_open_frame_names_a_trace_only_where_there_is_one() -> None:
    tokens = pack_tokens([1, 2])
    how = (SamplingParams(seed=1), Verification.COUPLED, 1.0, 5, 0)
    for context in ("", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
        frame = Open(1, 0, tokens, b"", [], 9, *how, trace_context=context)
        (sent,) = encode_target_frames(EPOCH, [frame]).frames.frames
        assert sent.open.trace_context == context
