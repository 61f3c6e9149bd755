"""An engine that stands still: a stopped process, a hung device, a rank that waits for ever."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client import Client, Started
from ssd_serving.engine.watch import EngineState, EngineWatch
from tests.process_tree import computing, is_alive, state_of
from tests.processes import SERVING, ServiceProcess, draft, link_states, target
from tests.suite.scale import full_only
from tests.waiting import wait_until
from tools.attack.frozen import HANG_NOW, hung_call
from tools.attack.half_record import half_a_record

TIMEOUT = "2.5"
PROMPT = "Once upon a time"
OPTIONS = {"max_tokens": 600, "temperature": 0.7, "seed": 3, "ignore_eos": True}
SHORTER = {**OPTIONS, "max_tokens": 200}


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
def stopping_inside_records(folder: Path) -> Iterator[Path]:
    """Engines that are started in here stop inside their next record once this file is there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in half_a_record(folder, folder / "stop").items():
            patch.setenv(name, value)
        yield folder / "stop"


def is_up(service: ServiceProcess, what: str) -> bool:
    return service.health(what) == SERVING


@pytest.mark.parametrize("which", ["engine", full_only("rank")])
def test_clients_go_on_elsewhere_and_probes_hear_of_it(tmp_path: Path, which: str) -> None:
    """The engine stops inside a record; a signal ends the service even then."""
    ranks = ["--tp", "2"] if which == "rank" else []
    flags = ["--engine-timeout", TIMEOUT, *ranks]
    with (
        target(tmp_path / "b") as second,
        stopping_inside_records(tmp_path) as stop,
        target(tmp_path / "a", *flags) as first,
    ):
        inside = None if ranks else stop
        with Client(second.address) as alone:
            expected = alone.generate(PROMPT, **OPTIONS).text
        held = ExitStack()
        with Client(first.address, second.address) as client:
            with client.stream(PROMPT, **OPTIONS) as stream:
                pieces = stream.text()
                text = next(pieces)
                held.enter_context(standing_still(first, inside))
                assert text + "".join(pieces) == expected
                assert stream.result.resumed == 1
            with held:
                wait_until(lambda: not is_up(first, "readiness"), "readiness goes off")
                wait_until(lambda: not is_up(first, "liveness"), "then liveness")
                assert client.generate(PROMPT, **OPTIONS).text == expected
            wait_until(lambda: is_up(first, "readiness"), "it goes on")
            assert is_up(first, "liveness")
        with Client(first.address) as again:
            assert again.generate(PROMPT, **OPTIONS).text == expected
        with standing_still(first, inside):
            first.terminate()
            assert first.wait_for_exit() == 0


def test_clients_leave_a_frozen_target_before_anything_else_notices(tmp_path: Path) -> None:
    """Its engine, its front, or both: 60 seconds are left of --engine-timeout. A stream that only
    waits for its turn is told that the engine goes on, and stays."""
    with target(tmp_path / "a", "--max-num-seqs", "1") as first, target(tmp_path / "b") as second:
        with Client(second.address) as alone:
            expected = alone.generate(PROMPT, **SHORTER).text
        front, engine = first.process.pid, computing(first.process.pid)[0]
        for frozen in ([engine], [front], [front, engine]):
            with Client(first.address, second.address, stall_timeout=6.0) as client:
                assert left_for_another(client, frozen) == [expected, expected]


def left_for_another(client: Client, frozen: list[int]) -> list[str]:
    """The texts of a stream that runs, and of one that queues behind it, at a target of which
    these processes freeze."""
    with client.stream(PROMPT, **SHORTER) as running, client.stream(PROMPT, **SHORTER) as queued:
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


def test_a_stream_that_queues_is_told_that_the_engine_goes_on(tmp_path: Path) -> None:
    with (
        target(tmp_path, "--max-num-seqs", "1") as service,
        service.channel() as channel,
        Client(service.address) as client,
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


def test_clients_go_on_elsewhere_when_the_device_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call holds the interpreter's lock: no thread of the engine runs any more."""
    with target(tmp_path / "b") as second, Client(second.address) as alone:
        expected = alone.generate(PROMPT, **OPTIONS).text
        for name, value in hung_call(tmp_path).items():
            monkeypatch.setenv(name, value)
        with (
            target(tmp_path / "a", "--engine-timeout", TIMEOUT) as first,
            Client(first.address, second.address) as client,
            client.stream(PROMPT, **OPTIONS) as stream,
        ):
            engine = computing(first.process.pid)[0]
            pieces = stream.text()
            text = next(pieces)
            (tmp_path / HANG_NOW).touch()
            assert text + "".join(pieces) == expected
            assert stream.result.resumed == 1
            wait_until(lambda: not is_up(first, "readiness"), "readiness goes off")
            wait_until(lambda: not is_up(first, "liveness"), "then liveness")
            first.process.kill()
            wait_until(lambda: not is_alive(engine), "an engine that hangs ends with its front")


def test_a_draft_whose_engine_stands_still_is_left_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        stopping_inside_records(tmp_path) as stop,
        draft(tmp_path / "draft", "--engine-timeout", TIMEOUT) as endpoint,
    ):
        flags = ["--draft", endpoint.address, "--link-timeout", "3600"]
        monkeypatch.setenv("HALF_A_RECORD", "")  # the target's engine does not
        with target(tmp_path / "target", *flags) as server:
            wait_until(lambda: link_states(server) == ["up"], server.log)
            with standing_still(endpoint, stop):
                wait_until(lambda: not is_up(endpoint, "readiness"), "readiness goes off")
                wait_until(lambda: link_states(server) != ["up"], "its targets are told")
                with Client(server.address) as client:
                    assert client.generate(PROMPT, **OPTIONS).text
            wait_until(lambda: is_up(endpoint, "readiness"), "it goes on")
            wait_until(lambda: link_states(server) == ["up"], "and is found again")


def test_an_engine_is_watched_by_how_long_it_is_silent() -> None:
    watch = EngineWatch(10.0)
    assert [watch.look(seconds) for seconds in (0.1, 9.9, 10.1)] == 3 * [EngineState.MOVING]
    assert watch.look(10.6) is EngineState.STALLED
    assert watch.look(19.9) is EngineState.STALLED
    assert watch.look(20.1) is EngineState.DEAD
    assert watch.look(0.1) is EngineState.MOVING


def test_a_front_that_stood_still_itself_reads_before_it_judges() -> None:
    """What came meanwhile is read between two looks."""
    watch = EngineWatch(10.0)
    assert watch.look(100.0) is EngineState.MOVING
    assert watch.look(0.1) is EngineState.MOVING
    assert watch.look(100.0) is EngineState.MOVING
