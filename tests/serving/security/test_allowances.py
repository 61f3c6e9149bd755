"""What one identity may use, and that it takes nothing from another."""

import pytest

from ssd_engine.errors import InputError
from ssd_serving.rpc.status import ServerFull
from ssd_serving.security.allowances import Accounts, Allowance, Identity

A, B = Identity("a"), Identity("b")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_at_a_time_are_counted_by_identity() -> None:
    refused: list[str] = []
    accounts = Accounts(Allowance(requests=2), refused.append)
    with accounts.request(A), accounts.request(A):
        with pytest.raises(ServerFull, match="'a' may run 2 requests"), accounts.request(A):
            pass
        with accounts.request(B):
            pass
    with accounts.request(A):
        pass
    assert refused == ["requests"]


def test_a_request_that_fails_gives_its_place_back() -> None:
    accounts = Accounts(Allowance(requests=1))
    for _ in range(3):
        with pytest.raises(ValueError), accounts.request(A):
            raise ValueError


def test_tokens_are_paid_for_afterwards() -> None:
    clock, refused = Clock(), []
    accounts = Accounts(Allowance(tokens_per_minute=60), refused.append, clock)
    with accounts.request(A) as account:
        accounts.spend(account, 90)  # one token a second: thirty are owed
    with pytest.raises(ServerFull, match="60 tokens a minute") as caught, accounts.request(A):
        pass
    assert caught.value.retry_seconds == pytest.approx(30)
    with accounts.request(B):
        pass
    clock.now += 31
    with accounts.request(A):
        pass
    assert refused == ["tokens_per_minute"]


def test_what_is_not_used_is_not_saved_up() -> None:
    clock = Clock()
    accounts = Accounts(Allowance(tokens_per_minute=60), clock=clock)
    with accounts.request(A):
        pass
    clock.now += 3600
    with accounts.request(A) as account:
        accounts.spend(account, 61)
    with pytest.raises(ServerFull), accounts.request(A):
        pass


def test_a_long_prompt_is_refused_by_its_field() -> None:
    accounts = Accounts(Allowance(prompt_tokens=10))
    with accounts.request(A) as account:
        accounts.check_prompt(account, "prompt", 10)
        with pytest.raises(InputError, match="may send 10 at most"):
            accounts.check_prompt(account, "prompt", 11)


def test_an_identity_may_have_limits_of_its_own() -> None:
    accounts = Accounts(Allowance(requests=1, prompt_tokens=5))
    large = Identity("a", Allowance(requests=2))
    with accounts.request(large), accounts.request(large) as account:
        with pytest.raises(InputError):
            accounts.check_prompt(account, "prompt", 6)
        # Its limit is taken back while two run: they go on, and a third has no place.
        with pytest.raises(ServerFull), accounts.request(A):
            pass
    with accounts.request(A):
        pass


def test_accounts_that_owe_nothing_are_forgotten() -> None:
    clock = Clock()
    accounts = Accounts(Allowance(tokens_per_minute=60), clock=clock)
    with accounts.request(A) as account:
        accounts.spend(account, 1000)
    for i in range(10_000):
        with accounts.request(Identity(f"{i}")):
            pass
    assert len(accounts) <= 5000
    with pytest.raises(ServerFull), accounts.request(A):
        pass
