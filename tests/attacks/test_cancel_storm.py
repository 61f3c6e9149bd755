"""Requests that are cancelled as soon as they are sent, one after the other, without end."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

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
    TOKEN_FILE,
    Attacked,
    bearer,
    generate,
    request,
)
from tests.process_tree import engine_held
from tests.security.certificates import replace
from tests.waiting import HANG_SECONDS, wait_until

PLACES = 32 + 256  # --max-num-seqs and --max-waiting, as they come


@contextmanager
def storm(
    attacked: Attacked, channel: grpc.Channel, token: str, number: int
) -> Iterator[list[grpc.StatusCode | None]]:
    """While the engine stands still; yields how each of so many requests began."""

    def one() -> grpc.StatusCode | None:
        call = attacked.stub(channel).Generate(
            request("word " * 50, tokens=200), timeout=HANG_SECONDS, metadata=bearer(token)
        )
        try:
            next(call)
        except grpc.RpcError as error:
            return error.code()
        call.cancel()
        return None

    with engine_held(attacked.target.process.pid):
        yield [one() for _ in range(number)]


def test_who_may_run_one_request_has_no_more_of_them_in_the_engine(attacked: Attacked) -> None:
    with attacked.target.channel() as channel, attacked.target.channel() as others:
        expected = generate(others, OTHER, request())
        with storm(attacked, channel, ATTACKER, 60) as began:
            assert began.count(None) == 1
            assert began.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 59
        assert generate(others, OTHER, request()) == expected
        wait_until(lambda: is_served(channel, ATTACKER), "the place is given back")


def is_served(channel: grpc.Channel, token: str) -> bool:
    try:
        return bool(generate(channel, token, request()))
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False


def test_what_waits_on_its_way_to_the_engine_counts_as_waiting(attacked: Attacked) -> None:
    """Of an identity without a limit of its own."""
    replace(attacked.token_file, TOKEN_FILE.replace("limit_requests = 1\n", "").encode())
    with attacked.target.channel() as channel, attacked.target.channel() as others:
        with storm(attacked, channel, ATTACKER, PLACES + 40) as began:
            assert began.count(None) <= PLACES
            assert began[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
        wait_until(lambda: is_served(others, OTHER), "places are given back")
    replace(attacked.token_file, TOKEN_FILE.encode())
    assert "Traceback" not in attacked.target.log()


def submit(sequence: int) -> Submit:
    return Submit(
        sequence,
        pack_tokens([1]),
        b"",
        SamplingParams(seed=1),
        StopRules(9),
        None,
        SpeculationRequest(),
    )


def test_a_cancel_overtakes_what_it_cancels() -> None:
    """The engine hears of neither the prompt nor anything else of a request that had not begun."""
    front, engine = multiprocessing.Pipe()
    inbox = EngineInbox(engine)
    said = [
        submit(1),
        submit(2),
        Cancel(1),
        submit(3),
        GiveBackWaiting(),
        DraftLinkDown(1, 1),
        Cancel(3),
    ]
    for record in said:
        front.send_bytes(encode(record))
    heard = []
    while inbox.poll(0):
        heard.append(inbox.receive())
    assert heard == [DraftLinkDown(1, 1), submit(2), Cancel(1), GiveBackWaiting(), Cancel(3)]
    front.send_bytes(encode(submit(1)))  # numbers are not used again; were they, it would be heard
    assert inbox.poll(0)
    assert inbox.receive() == submit(1)
