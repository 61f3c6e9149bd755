"""What one identity may use of a service: requests at a time, tokens a minute, prompt tokens.

The tokens are paid for when they are there: a request is admitted while the account is not in
debt, and what it takes beyond that holds the next one up.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ssd_engine.errors import InputError
from ssd_serving.rpc.status import ServerFull

MINUTE = 60.0
MOST_OWED = 1.0  # minutes: what ran side by side does not lock anybody out for longer
RETRY_SECONDS = 1.0  # for a place: nobody knows when a request ends
MANY_ACCOUNTS = 4096  # beyond which those that owe nothing are forgotten


@dataclass(frozen=True)
class Allowance:
    """The limits of one identity; None: no limit. Options and token files call these limit_…"""

    requests: int | None = None
    tokens_per_minute: int | None = None
    prompt_tokens: int | None = None

    def or_else(self, other: "Allowance") -> "Allowance":
        def first(mine: int | None, theirs: int | None) -> int | None:
            return theirs if mine is None else mine

        return Allowance(
            first(self.requests, other.requests),
            first(self.tokens_per_minute, other.tokens_per_minute),
            first(self.prompt_tokens, other.prompt_tokens),
        )


@dataclass(frozen=True)
class Identity:
    """Who calls: the name of a token, else of a client's certificate."""

    name: str
    allowance: Allowance = Allowance()


class IdentityAccount:
    """The account of one identity. Callers pass the time in as a number."""

    def __init__(self, identity: Identity, allowance: Allowance, now: float) -> None:
        self.identity = identity
        self.allowance = allowance
        self.running = 0
        self.turn = asyncio.Lock()  # what takes long is done for one of its requests at a time
        self._left = float(allowance.tokens_per_minute or 0)
        self._at = now

    def spend(self, tokens: int, now: float) -> None:
        rate = self.allowance.tokens_per_minute
        if rate is not None:
            self._left = max(-MOST_OWED * rate, self.left(now) - tokens)
            self._at = now

    def left(self, now: float) -> float:
        """Tokens that are left of a minute's allowance; a negative number is owed."""
        rate = float(self.allowance.tokens_per_minute or 0)
        return min(rate, self._left + (now - self._at) * rate / MINUTE)

    def wait(self, now: float) -> float:
        """Seconds until a new request is admitted."""
        rate = self.allowance.tokens_per_minute
        owed = -self.left(now)
        return 0.0 if rate is None or owed < 0 else max(owed * MINUTE / rate, 0.1)

    def is_idle(self, now: float) -> bool:
        rate = self.allowance.tokens_per_minute
        return not self.running and (rate is None or self.left(now) >= rate)


class Accounts:
    """The accounts of all identities. Use from one event loop."""

    def __init__(
        self,
        usual: Allowance,
        on_refusal: Callable[[str], None] = lambda limit: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``usual``: the allowance of identities that have none of their own."""
        self._usual = usual
        self._on_refusal = on_refusal
        self._now = clock
        self._accounts: dict[str, IdentityAccount] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def request(self, identity: Identity) -> Iterator[IdentityAccount]:
        """One request, for as long as it lasts."""
        account = self._account(identity)
        self._check_requests(account)
        self._check_tokens(account)
        account.running += 1
        try:
            yield account
        finally:
            account.running -= 1

    def check_prompt(self, account: IdentityAccount, field: str, tokens: int) -> None:
        limit = account.allowance.prompt_tokens
        if limit is not None and tokens > limit:
            self._on_refusal("prompt_tokens")
            raise InputError(
                field, f"{tokens} tokens, and {account.identity.name!r} may send {limit} at most"
            )

    def spend(self, account: IdentityAccount, tokens: int) -> None:
        account.spend(tokens, self._now())

    def _account(self, identity: Identity) -> IdentityAccount:
        allowance = identity.allowance.or_else(self._usual)
        known = self._accounts.get(identity.name)
        if known is not None:
            known.allowance = allowance  # as it is now: a token file may have changed
            return known
        if len(self._accounts) >= MANY_ACCOUNTS:
            self._forget_idle()
        account = self._accounts[identity.name] = IdentityAccount(identity, allowance, self._now())
        return account

    def _forget_idle(self) -> None:
        now = self._now()
        self._accounts = {n: a for n, a in self._accounts.items() if not a.is_idle(now)}

    def _check_requests(self, account: IdentityAccount) -> None:
        limit = account.allowance.requests
        if limit is not None and account.running >= limit:
            self._on_refusal("requests")
            raise ServerFull(
                f"{account.identity.name!r} may run {limit} requests at a time", RETRY_SECONDS
            )

    def _check_tokens(self, account: IdentityAccount) -> None:
        wait = account.wait(self._now())
        if wait > 0:
            self._on_refusal("tokens_per_minute")
            raise ServerFull(
                f"{account.identity.name!r} has used its {account.allowance.tokens_per_minute} "
                f"tokens a minute; try again in {wait:.1f} s",
                wait,
            )
