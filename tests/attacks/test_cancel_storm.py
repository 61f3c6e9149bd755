"""Requests that are cancelled as soon as they are sent, one after the other, without end."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc

from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_serving.engine.records import encode
from ssd_target.engine.engine_process import EngineInbox
from ssd_target.records.engine_records import Cancel, DraftLinkDown, GiveBackWaiting, Submit
from ssd_target.records.speculation_options import SpeculationRequest
from tests.attacks.conftest import (
    ATTACKER,
    OTHER,
    UNLIMITED,
    Attacked,
    bearer,
    generate,
    request,
)
from tests.process_tree import engine_held
from tests.waiting import HANG_SECONDS, wait_until

PLACES = 32 + 256  # --max-num-seqs and --max-waiting, as they come


@contextmanager
def storm(
    attacked: Attacked, channel: grpc.Channel, token: str, number: int
) -> Iterator[list[grpc.StatusCode | None]]:
    """While the engine stands still; yields how each of so many requests began."""
    asked = request("word " * 50, tokens=200)

    def one() -> grpc.StatusCode | None:
        call = attacked.stub(channel).Generate(asked, timeout=HANG_SECONDS, metadata=bearer(token))
        try:
            next(call)
        except grpc.RpcError as error:
            return error.code()
        call.cancel()
        return None

    with engine_held(attacked.target.process.pid):
        yield [one() for _ in range(number)]


def is_served(channel: grpc.Channel, token: str) -> bool:
    with suppress(grpc.RpcError):
        return bool(generate(channel, token, request()))
    return False


def test_who_may_run_one_request_has_no_more_of_them_in_the_engine(attacked: Attacked) -> None:
    with attacked.target.channel() as channel, attacked.target.channel() as others:
        expected = generate(others, OTHER, request())
        with storm(attacked, channel, ATTACKER, 60) as began:
            assert began.count(None) == 1
            assert began.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 59
        assert generate(others, OTHER, request()) == expected
        wait_until(lambda: is_served(channel, ATTACKER), "the place is given back")


def test_what_waits_on_its_way_to_the_engine_counts_as_waiting(attacked: Attacked) -> None:
    """Of an identity without a limit of its own."""
    with attacked.target.channel() as channel, attacked.target.channel() as others:
        with storm(attacked, channel, UNLIMITED, PLACES + 40) as began:
            assert began.count(None) <= PLACES
            assert began[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
        wait_until(lambda: is_served(others, OTHER), "places are given back")
    assert "Traceback" not in attacked.target.log()


def submit(sequence: int) -> Submit:
    sampling, asked = SamplingParams(seed=1), SpeculationRequest()
    return Submit(sequence, pack_tokens([1]), b"", sampling, StopRules(9), None, asked)


def test_a_cancel_overtakes_what_it_cancels() -> None:
    """The engine hears of neither the prompt nor anything else of a request that had not begun."""
    front, engine = multiprocessing.Pipe()
    inbox, up = EngineInbox(engine), DraftLinkDown(1, 1)
    first, second, third = map(submit, (1, 2, 3))

    def heard(*said: object) -> list[object]:
        for record in said:
            front.send_bytes(encode(record))
        return [inbox.receive() for _ in iter(lambda: inbox.poll(0), False)]

    said = (first, second, Cancel(1), third, GiveBackWaiting(), up, Cancel(3))
    assert heard(*said) == [up, second, Cancel(1), GiveBackWaiting(), Cancel(3)]
    assert heard(first) == [first]  # numbers are not used again; were they, it would be heard
