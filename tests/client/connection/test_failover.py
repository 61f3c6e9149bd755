"""The choice of the next endpoint, without a network or a clock."""

from __future__ import annotations

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


def full(delay_s):
    return EndpointFullError("full", delay_s)


def test_every_endpoint_is_tried_once_in_order():
    rota = RetrySchedule(3, RetryPolicy())
    assert rota.best() == (0, 0.0)
    rota.note(0, LOST, 0, now=1.0)
    assert rota.best() == (1, 0.0)
    rota.note(1, LOST, 5, now=2.0)
    assert rota.best() == (2, 0.0)
    with pytest.raises(EndpointLostError, match=r"a:1 lost after 7 tokens \(gone\)$"):
        rota.note(2, LOST, 7, now=3.0)


def test_a_single_endpoint_is_not_tried_again_unless_asked():
    with pytest.raises(EndpointLostError, match="a second --target or --retries"):
        RetrySchedule(1, RetryPolicy()).note(0, LOST, 1, now=0.0)


def test_retries_return_to_the_endpoint_lost_first_with_growing_waits():
    rota = RetrySchedule(2, RetryPolicy(retries=5, lost_wait_s=1.0, lost_wait_max_s=3.0))
    rota.note(0, LOST, 0, now=10.0)
    rota.note(1, LOST, 0, now=10.1)
    assert rota.best() == (0, 11.0)
    rota.note(0, LOST, 0, now=11.0)
    assert rota.best() == (1, 11.1)
    rota.note(1, LOST, 0, now=20.0)
    assert rota.best() == (0, 13.0)
    rota.note(0, LOST, 0, now=20.0)
    assert rota.best() == (1, 22.0)
    with pytest.raises(EndpointLostError):
        rota.note(1, LOST, 0, now=22.0)


def test_no_retries_at_all():
    with pytest.raises(EndpointLostError, match="a:1: gone"):
        RetrySchedule(3, RetryPolicy(retries=0)).note(0, LOST, 0, now=0.0)


def test_a_full_endpoint_is_better_than_a_lost_one_and_worse_than_an_untried_one():
    rota = RetrySchedule(3, RetryPolicy())
    rota.note(0, full(9.0), 0, now=0.0)
    assert rota.best() == (1, 0.0)
    rota.note(1, LOST, 0, now=0.0)
    assert rota.best() == (2, 0.0)
    rota.note(2, full(4.0), 0, now=0.0)
    assert rota.best() == (2, 4.0)


def test_waits_for_full_endpoints_are_the_servers_within_bounds():
    rota = RetrySchedule(1, RetryPolicy(full_tries=3, full_wait_s=1.5, full_wait_max_s=60.0))
    rota.note(0, full(None), 0, now=0.0)
    assert rota.best() == (0, 1.5)
    rota.note(0, full(1e6), 0, now=2.0)
    assert rota.best() == (0, 62.0)
    with pytest.raises(EndpointFullError):
        rota.note(0, full(0.1), 0, now=62.0)


def test_full_answers_do_not_use_up_the_retries():
    rota = RetrySchedule(2, RetryPolicy())
    for index in (0, 1, 0):
        rota.note(index, full(0.1), 0, now=0.0)
    rota.note(1, LOST, 0, now=0.0)
    assert rota.best()[0] == 0


def test_other_failures_end_the_request():
    with pytest.raises(BadInputError):
        RetrySchedule(3, RetryPolicy()).note(0, BadInputError("no"), 0, now=0.0)


def leaving(delay_s):
    return EndpointLeavingError("draining", delay_s)


def test_who_leaves_politely_is_no_loss_and_is_asked_last():
    rota = RetrySchedule(2, RetryPolicy(retries=0))
    rota.note(0, leaving(1.0), 3, now=0.0)
    assert rota.best() == (1, 0.0)
    rota.note(1, leaving(2.0), 5, now=0.5)
    assert rota.best() == (0, 1.0)  # by then it may be back
    with pytest.raises(EndpointLostError):
        rota.note(0, LOST, 5, now=1.0)


def test_one_that_says_for_ever_that_it_leaves_is_believed_in_the_end():
    rota = RetrySchedule(1, RetryPolicy(leaving_tries=3))
    for now in (0.0, 1.0):
        rota.note(0, leaving(0.5), 0, now=now)
        assert rota.best() == (0, now + 0.5)
    with pytest.raises(EndpointLeavingError):
        rota.note(0, leaving(0.5), 0, now=2.0)


def test_endpoints_that_come_later_have_retries_of_their_own():
    rota = RetrySchedule(1, RetryPolicy())
    assert rota.hopeless(0, LOST)
    assert not rota.hopeless(0, full(1.0))
    rota.grow(3)
    assert not rota.hopeless(0, LOST)
    rota.note(0, LOST, 0, now=0.0)
    assert rota.best() == (1, 0.0)
    rota.note(1, LOST, 0, now=0.0)
    assert rota.best() == (2, 0.0)
    assert rota.hopeless(2, LOST)
    with pytest.raises(EndpointLostError):
        rota.note(2, LOST, 0, now=0.0)


def test_a_request_that_failed_is_tried_at_one_other_endpoint():
    rota = RetrySchedule(3, RetryPolicy())
    rota.note(0, FAILED, 5, now=0.0)
    assert rota.best() == (1, 0.0)
    with pytest.raises(EndpointFailedError, match="b:1"):
        rota.note(1, EndpointFailedError("b:1: no"), 5, now=0.0)


@pytest.mark.parametrize("other", [LOST, ModelMismatchError("another model")])
def test_a_failure_is_reported_where_the_other_endpoint_is_of_no_use(other):
    rota = RetrySchedule(2, RetryPolicy())
    rota.note(0, FAILED, 5, now=0.0)
    with pytest.raises(EndpointFailedError, match="out of cheese"):
        rota.note(1, other, 5, now=0.0)


@pytest.mark.parametrize(("endpoints", "retries"), [(1, None), (1, 5), (3, 0)])
def test_a_failure_with_no_other_endpoint_or_no_retries_ends_the_request(endpoints, retries):
    with pytest.raises(EndpointFailedError):
        RetrySchedule(endpoints, RetryPolicy(retries=retries)).note(0, FAILED, 5, now=0.0)


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
