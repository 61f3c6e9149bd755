"""The choice of the next endpoint, without a network or a clock."""

import pytest

from ssd_client.connection.failover import RetryPolicy, RetrySchedule
from ssd_client.errors import (
    BadInputError,
    EndpointFailedError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
    ModelMismatchError,
)

LOST = EndpointLostError("a:1", "gone")
FAILED = EndpointFailedError("a:1: out of cheese")
MISFIT, BAD = ModelMismatchError("another model"), BadInputError("no")


def full(delay_s):
    return EndpointFullError("full", delay_s)


def leaving(delay_s):
    return EndpointLeavingError("draining", delay_s)


SLOWER = RetryPolicy(retries=5, lost_wait_s=1.0, lost_wait_max_s=3.0)
FULL_POLICY = RetryPolicy(full_tries=3, full_wait_s=1.5, full_wait_max_s=60.0)


@pytest.mark.parametrize(
    ("endpoints", "policy", "steps"),
    [
        # Every one is tried once, in order.
        (
            3,
            RetryPolicy(),
            [(0, LOST, 1.0, (1, 0.0)), (1, LOST, 2.0, (2, 0.0)), (2, LOST, 3.0, LOST)],
        ),
        # Retries return to the one that was lost first, with growing waits.
        (
            2,
            SLOWER,
            [
                (0, LOST, 10.0, (1, 0.0)),
                (1, LOST, 10.1, (0, 11.0)),
                (0, LOST, 11.0, (1, 11.1)),
                (1, LOST, 20.0, (0, 13.0)),
                (0, LOST, 20.0, (1, 22.0)),
                (1, LOST, 22.0, LOST),
            ],
        ),
        # One that is full is better than one that is lost, and worse than one that is untried.
        (
            3,
            RetryPolicy(),
            [
                (0, full(9.0), 0.0, (1, 0.0)),
                (1, LOST, 0.0, (2, 0.0)),
                (2, full(4.0), 0.0, (2, 4.0)),
            ],
        ),
        # Waits for full ones are the server's, within bounds, and not for ever.
        (
            1,
            FULL_POLICY,
            [
                (0, full(None), 0.0, (0, 1.5)),
                (0, full(1e6), 2.0, (0, 62.0)),
                (0, full(0.1), 62.0, full(1)),
            ],
        ),
        # Full answers do not use up the retries.
        (
            2,
            RetryPolicy(),
            [
                (0, full(0.1), 0.0, (1, 0.0)),
                (1, full(0.1), 0.0, (0, 0.1)),
                (0, full(0.2), 0.0, (1, 0.1)),
                (1, LOST, 0.0, (0, 0.2)),
            ],
        ),
        # Who leaves politely is no loss, and is asked last: by then it may be back.
        (
            2,
            RetryPolicy(retries=0),
            [
                (0, leaving(1.0), 0.0, (1, 0.0)),
                (1, leaving(2.0), 0.5, (0, 1.0)),
                (0, LOST, 1.0, LOST),
            ],
        ),
        # One that says for ever that it leaves is believed in the end.
        (
            1,
            RetryPolicy(leaving_tries=3),
            [
                (0, leaving(0.5), 0.0, (0, 0.5)),
                (0, leaving(0.5), 1.0, (0, 1.5)),
                (0, leaving(0.5), 2.0, leaving(1)),
            ],
        ),
        # A request that failed is tried at one other endpoint; the first error is told where that
        # is of no use.
        (3, RetryPolicy(), [(0, FAILED, 0.0, (1, 0.0)), (1, FAILED, 0.0, FAILED)]),
        (2, RetryPolicy(), [(0, FAILED, 0.0, (1, 0.0)), (1, LOST, 0.0, FAILED)]),
        (2, RetryPolicy(), [(0, FAILED, 0.0, (1, 0.0)), (1, MISFIT, 0.0, FAILED)]),
        (1, RetryPolicy(), [(0, FAILED, 0.0, FAILED)]),
        (1, RetryPolicy(retries=5), [(0, FAILED, 0.0, FAILED)]),
        (3, RetryPolicy(retries=0), [(0, FAILED, 0.0, FAILED)]),
        (3, RetryPolicy(retries=0), [(0, LOST, 0.0, LOST)]),
        (3, RetryPolicy(), [(0, BAD, 0.0, BAD)]),  # others would refuse it, too
    ],
)
def test_which_endpoint_is_asked_next(endpoints, policy, steps):
    """Steps: who fails, how, when; then who is asked from when on, or what ends the request."""
    rota = RetrySchedule(endpoints, policy)
    assert rota.best() == (0, 0.0)
    for index, failure, now, outcome in steps:
        if isinstance(outcome, tuple):
            rota.note(index, failure, 0, now)
            assert rota.best() == outcome
        else:
            with pytest.raises(type(outcome)):
                rota.note(index, failure, 0, now)


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [(1, r"\(gone\); a second --target or --retries"), (2, r"a:1 lost after 7 tokens \(gone\)$")],
)
def test_a_loss_says_what_would_have_helped(endpoints, message):
    rota = RetrySchedule(endpoints, RetryPolicy(retries=endpoints - 1))
    for index in range(endpoints - 1):
        rota.note(index, LOST, 0, now=0.0)
    with pytest.raises(EndpointLostError, match=message):
        rota.note(endpoints - 1, LOST, 7, now=0.0)


def test_endpoints_that_come_later_have_retries_of_their_own():
    rota = RetrySchedule(1, RetryPolicy())
    assert rota.hopeless(0, LOST)
    assert not rota.hopeless(0, full(1.0))
    rota.grow(3)
    assert not rota.hopeless(0, LOST)
    for index in (0, 1):
        rota.note(index, LOST, 0, now=0.0)
        assert rota.best() == (index + 1, 0.0)
    assert rota.hopeless(2, LOST)
    with pytest.raises(EndpointLostError):
        rota.note(2, LOST, 0, now=0.0)


def test_a_failure_is_remembered_when_all_else_is_forgotten():
    rota = RetrySchedule(2, RetryPolicy())
    rota.note(0, FAILED, 0, now=0.0)
    anew = rota.begin_anew(RetryPolicy(retries=12))
    assert anew.best() == (1, 0.0)
    with pytest.raises(EndpointFailedError):
        anew.note(1, FAILED, 3, now=1.0)


def test_an_endpoint_is_left_of_our_own_accord_only_for_another():
    assert not RetrySchedule(1, RetryPolicy(retries=9)).may_leave(0)
    rota = RetrySchedule(2, RetryPolicy())
    assert rota.may_leave(0)
    rota.note(0, LOST, 0, now=0.0)
    assert not rota.may_leave(1)  # a loss of this one would be the last


def test_of_endpoints_that_may_do_the_ready_ones_are_asked_first():
    ready = {0, 2}
    rota = RetrySchedule(3, RetryPolicy(), ready.__contains__)
    assert rota.may_leave(0)
    rota.note(0, LOST, 0, now=0.0)
    assert rota.best() == (2, 0.0)
    assert rota.may_leave(2)  # the first one: it was lost, and is back
    ready.clear()
    assert not rota.may_leave(2)  # it may go on, where others surely would not
    assert rota.best() == (1, 0.0)  # somebody has to be asked


def test_a_stall_timeout_below_the_beats_is_refused():
    with pytest.raises(BadInputError, match=r"stall_timeout: 2 s is too short.*give 6 or more"):
        RetryPolicy(stall_timeout_s=2.0)
