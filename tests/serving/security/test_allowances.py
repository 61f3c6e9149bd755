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


def assert_full(accounts: Accounts, who: Identity, words: str = ".") -> ServerFull:
    with pytest.raises(ServerFull, match=words) as caught, accounts.request(who):
        pass
    return caught.value


def assert_served(accounts: Accounts, who: Identity, tokens: int = 0) -> None:
    with accounts.request(who) as account:
        accounts.spend(account, tokens)


def test_requests_at_a_time_are_counted_by_identity() -> None:
    """One that fails gives its place back."""
    refused: list[str] = []
    accounts = Accounts(Allowance(requests=2), refused.append)
    with accounts.request(A), accounts.request(A):
        assert_full(accounts, A, "'a' may run 2 requests")
        assert_served(accounts, B)
    for _ in range(3):
        with pytest.raises(ValueError), accounts.request(A):
            raise ValueError
    assert_served(accounts, A)
    assert refused == ["requests"]


def test_tokens_are_paid_for_afterwards() -> None:
    """What is not used is not saved up."""
    clock, refused = Clock(), []
    accounts = Accounts(Allowance(tokens_per_minute=60), refused.append, clock)
    assert_served(accounts, A, 90)  # one token a second: thirty are owed
    full = assert_full(accounts, A, "60 tokens a minute")
    assert full.retry_seconds == pytest.approx(30)
    assert_served(accounts, B)
    clock.now += 31
    assert_served(accounts, A)
    clock.now += 3600
    assert_served(accounts, A, 61)
    assert_full(accounts, A)
    assert refused == ["tokens_per_minute"] * 2


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
        assert_full(accounts, A)
    assert_served(accounts, A)


def test_accounts_that_owe_nothing_are_forgotten() -> None:
    accounts = Accounts(Allowance(tokens_per_minute=60), clock=Clock())
    assert_served(accounts, A, 1000)
    for i in range(10_000):
        assert_served(accounts, Identity(f"{i}"))
    assert len(accounts) <= 5000
    assert_full(accounts, A)
