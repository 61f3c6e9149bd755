"""A target as a client: endpoints that answer its link with whatever the descriptor allows."""

import threading
from collections import Counter
from collections.abc import Iterator

import grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ssd.v1 import speculation_pb2 as pb
from tests.processes import wait_until_idle
from tests.speculation.generations import SSD, Generations, Pair, request
from tests.speculation.hostile_draft import HostileDraft, Reply, Visit, begins_round, branches
from tests.suite.scale import share
from tests.waiting import wait_until
from tests.wire.messages import body, malformed, requests

ROUNDS = 60  # in full mode
ENDPOINTS = 16  # of a request: the most
RESPONSE = pb.SpeculateResponse.DESCRIPTOR

# A welcome with anything after it, or instead of it; then messages.
WELCOMES = st.one_of(
    st.just((True, b"")),
    st.just((True, b"")),
    st.tuples(st.just(True), body(RESPONSE)),
    st.tuples(st.just(False), requests(RESPONSE, [])),
)
MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just(True), body(RESPONSE)),
        st.tuples(st.just(True), body(RESPONSE)),
        st.tuples(st.just(False), body(RESPONSE)),
        st.tuples(st.just(False), malformed(body(RESPONSE))),
    ),
    max_size=6,
)
SCRIPTS = st.lists(st.tuples(WELCOMES, MESSAGES), min_size=ENDPOINTS, max_size=ENDPOINTS)
Script = tuple[tuple[bool, bytes], list[tuple[bool, bytes]]]


class Fuzz:
    """Each visit is served by the next script; what was said is counted."""

    def __init__(self, scripts: list[Script], said: "Counter[str]") -> None:
        self._scripts = iter(scripts)
        self._lock = threading.Lock()
        self._said = said

    def __call__(self, visit: Visit) -> Iterator[Reply]:
        with self._lock:
            script = next(self._scripts, None)
        if script is None:
            visit.context.abort(grpc.StatusCode.UNAVAILABLE, "no more")
            return
        (welcomes, greeting), messages = script
        self._said["greetings"] += 1
        yield (visit.welcome().SerializeToString() if welcomes else b"") + greeting
        for answers, data in messages:
            yield (visit.say().SerializeToString() if answers else b"") + data
        # As far as a sequence was given to this endpoint: a sound answer, and something after it.
        for number, frame in enumerate(visit.frames()):
            if begins_round(frame):
                sound = visit.say(branches(frame, pb.Branch(token=5, tokens=[6, 7])))
                extra = messages[number % len(messages)][1] if messages else b""
                yield sound.SerializeToString() + extra
            if number > 20:
                return


def test_nothing_that_an_endpoint_answers_harms_a_target(victims: Pair) -> None:
    said: Counter[str] = Counter()
    seeds = iter(range(10_000))

    @settings(
        max_examples=share(ROUNDS),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCRIPTS)
    def attack(scripts: list[Script]) -> None:
        with HostileDraft(Fuzz(scripts, said), ENDPOINTS) as hostile:
            among = {"mode": SSD, "endpoints": hostile.addresses}
            messages = [request(next(seeds) % 6, 30, speculation=among) for _ in range(3)]
            plain = victims.plain.of(messages)
            with Generations(victims.target, messages) as running:
                pass
            assert running.texts() == plain
            said["rounds"] += 1
            wait_until(lambda: said["greetings"] >= said["rounds"] * ENDPOINTS, said)
        assert victims.target.process.poll() is None

    attack()
    assert said["rounds"] >= share(ROUNDS)
    wait_until_idle(victims.target)
    assert "Traceback" not in victims.target.log()
