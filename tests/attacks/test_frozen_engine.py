"""An engine that stands still: a stopped process, a hung device, a rank that waits for ever."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client import Client, Started
from ssd_serving.engine.watch import EngineState, EngineWatch
from tests.process_tree import computing, is_alive, state_of
from tests.processes import SERVING, ServiceProcess, TargetProcess, draft, link_states, target
from tests.suite.scale import full_only
from tests.waiting import wait_until
from tools.attack.frozen import HANG_NOW, hung_call
from tools.attack.half_record import half_a_record

FLAGS = ("--engine-timeout", "2.5")
PROMPT = "Once upon a time"
OPTIONS = {"max_tokens": 160, "temperature": 0.7, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """Where clients go on."""
    with target(tmp_path_factory.mktemp("elsewhere")) as service:
        yield service


@pytest.fixture(scope="module")
def expected(elsewhere: TargetProcess) -> str:
    with Client(elsewhere.address) as alone:
        return alone.generate(PROMPT, **OPTIONS).text


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """Here the second stream waits for the first."""
    with target(tmp_path_factory.mktemp("narrow"), "--max-num-seqs", "1") as service:
        yield service


@contextmanager
def standing_still(service: ServiceProcess, inside_a_record: Path | None) -> Iterator[None]:
    """The engine, once the file is there; without one, a rank of it."""
    process = wait_until(lambda: computing(service.process.pid)[inside_a_record is None :])[0]
    if inside_a_record is None:
        os.kill(process, signal.SIGSTOP)
    else:
        inside_a_record.touch()
        wait_until(lambda: state_of(process) == "T")
    try:
        yield
    finally:
        if is_alive(process):
            os.kill(process, signal.SIGCONT)


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """For services that are started in here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def is_up(service: ServiceProcess, what: str = "readiness") -> bool:
    return service.health(what) == SERVING


def wait_until_noticed(service: ServiceProcess) -> None:
    for what in ("readiness", "liveness"):
        wait_until(lambda what=what: not is_up(service, what), f"{what} goes off")


def text_that_moves(client: Client, freeze: Callable[[], object]) -> str:
    """Of a stream whose target freezes when it has begun."""
    with client.stream(PROMPT, **OPTIONS) as stream:
        pieces = stream.text()
        text = next(pieces)
        freeze()
        text += "".join(pieces)
        assert stream.result.resumed == 1
    return text


@pytest.mark.parametrize("which", ["engine", full_only("rank")])
def test_clients_go_on_elsewhere_and_probes_hear_of_it(
    tmp_path: Path, elsewhere: TargetProcess, expected: str, which: str
) -> None:
    """The engine stops inside a record; a signal ends the service even then."""
    inside = tmp_path / "stop" if which == "engine" else None
    flags = FLAGS if inside else (*FLAGS, "--tp", "2")
    with (
        with_variables(half_a_record(tmp_path, tmp_path / "stop")),
        target(tmp_path / "a", *flags) as first,
    ):
        with Client(first.address, elsewhere.address) as client, ExitStack() as held:
            stand = standing_still(first, inside)
            assert text_that_moves(client, lambda: held.enter_context(stand)) == expected
            wait_until_noticed(first)
            assert client.generate(PROMPT, **OPTIONS).text == expected
        wait_until(lambda: is_up(first), "it goes on")
        assert is_up(first, "liveness")
        with Client(first.address) as again:
            assert again.generate(PROMPT, **OPTIONS).text == expected
        with standing_still(first, inside):
            first.terminate()
            assert first.wait_for_exit() == 0


def test_clients_go_on_elsewhere_when_the_device_does_not_come_back(
    tmp_path: Path, elsewhere: TargetProcess, expected: str
) -> None:
    """The call holds the interpreter's lock: no thread of the engine runs any more."""
    with (
        with_variables(hung_call(tmp_path)),
        target(tmp_path / "a", *FLAGS) as first,
        Client(first.address, elsewhere.address) as client,
    ):
        engine = computing(first.process.pid)[0]
        assert text_that_moves(client, (tmp_path / HANG_NOW).touch) == expected
        wait_until_noticed(first)
        first.process.kill()
        wait_until(lambda: not is_alive(engine), "an engine that hangs ends with its front")


def test_clients_leave_a_frozen_target_before_anything_else_notices(
    narrow: TargetProcess, elsewhere: TargetProcess, expected: str
) -> None:
    """Its engine, its front, or both: 60 seconds are left of --engine-timeout. A stream that only
    waits for its turn is told that the engine goes on, and stays."""
    front, engine = narrow.process.pid, computing(narrow.process.pid)[0]
    for frozen in ([engine], [front], [front, engine]):
        with Client(narrow.address, elsewhere.address, stall_timeout=6.0) as client:
            assert left_for_another(client, frozen) == [expected, expected]


def left_for_another(client: Client, frozen: list[int]) -> list[str]:
    """The texts of a stream that runs, and of one that queues behind it, at a target of which
    these processes freeze."""
    with client.stream(PROMPT, **OPTIONS) as running, client.stream(PROMPT, **OPTIONS) as queued:
        pieces = running.text()
        text = next(pieces)
        assert isinstance(next(queued), Started)
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        try:
            texts = [text + "".join(pieces), "".join(queued.text())]
            assert (running.result.resumed, len(queued.result.endpoints)) == (1, 2)
        finally:
            for process in frozen:
                os.kill(process, signal.SIGCONT)
        return texts


def test_a_stream_that_queues_is_told_that_the_engine_goes_on(narrow: TargetProcess) -> None:
    with (
        narrow.channel() as channel,
        Client(narrow.address) as client,
        client.stream(PROMPT, **{**OPTIONS, "max_tokens": None}) as running,
    ):
        next(running.text())
        stub = rpc.TargetServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text=PROMPT, stop=pb.StopOptions(max_tokens=4)))
        assert next(call).started.beat_millis > 0
        assert next(call).WhichOneof("event") == "beat"
        running.close()
        kinds = [each.WhichOneof("event") for each in call]
        assert [kind for kind in kinds if kind != "beat"][-1] == "finish"


def test_a_draft_whose_engine_stands_still_is_left_and_found_again(tmp_path: Path) -> None:
    with ExitStack() as services:
        with with_variables(half_a_record(tmp_path, tmp_path / "stop")):
            endpoint = services.enter_context(draft(tmp_path / "draft", *FLAGS))
        flags = ["--draft", endpoint.address, "--link-timeout", "3600"]
        server = services.enter_context(target(tmp_path / "target", *flags))
        wait_until(lambda: link_states(server) == ["up"], server.log)
        with standing_still(endpoint, tmp_path / "stop"):
            wait_until(lambda: not is_up(endpoint), "readiness goes off")
            wait_until(lambda: link_states(server) != ["up"], "its targets are told")
            with Client(server.address) as client:
                assert client.generate(PROMPT, **OPTIONS).text
        wait_until(lambda: is_up(endpoint), "it goes on")
        wait_until(lambda: link_states(server) == ["up"], "and is found again")


def test_an_engine_is_watched_by_how_long_it_is_silent() -> None:
    """A front that stood still itself reads what came meanwhile before it judges."""
    moving, stalled, dead = EngineState.MOVING, EngineState.STALLED, EngineState.DEAD
    watch = EngineWatch(10.0)
    looks = {0.1: moving, 9.9: moving, 10.1: moving, 10.6: stalled, 19.9: stalled, 20.1: dead}
    assert {seconds: watch.look(seconds) for seconds in looks} == looks
    assert watch.look(0.1) is moving
    assert [EngineWatch(10.0).look(100.0), watch.look(100.0)] == [moving, moving]
