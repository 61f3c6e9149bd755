"""All targets behind the addresses and names that the operator gave, looked at again and again."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

from ssd_client.connection.endpoints import DNS, MAX_ADDRESSES, resolve_host
from ssd_client.connection.security import Security
from ssd_gateway.targets.target import Metadata, Target

log = logging.getLogger(__name__)


class TargetPool:
    def __init__(
        self,
        named: Sequence[str],
        security: Security,
        refresh_seconds: float,
        discover_seconds: float,
    ) -> None:
        """``security``: the gateway's own; its token is shown where it asks on its own behalf."""
        self._named, self.security = named, security
        self._refresh_seconds, self._discover_seconds = refresh_seconds, discover_seconds
        self._targets: dict[str, Target] = {}
        self._looked_up_at: float | None = None

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self._targets.values()))

    def __len__(self) -> int:
        return len(self._targets)

    def find(self, address: str) -> Target | None:
        return self._targets.get(address)

    def own_metadata(self, target: Target) -> Metadata:
        return self.security.metadata(target.address)

    async def run(self) -> None:
        """Refreshes targets until it is cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("targets could not be looked at")
            await asyncio.sleep(self._refresh_seconds)

    async def refresh(self) -> None:
        now = time.monotonic()
        if self._looked_up_at is None or now - self._looked_up_at >= self._discover_seconds:
            self._looked_up_at = now
            await self.look_up()
        before = {target.address: target.ready for target in self}
        await asyncio.gather(*(each.refresh(self.own_metadata(each)) for each in self))
        for target in self:
            if before.get(target.address) != target.ready:
                state = "ready" if target.ready else f"not ready: {target.problem}"
                log.info("target %s is %s", target.address, state)

    async def look_up(self) -> None:
        """Adds the addresses that names have got, and forgets those that they have lost."""
        found: dict[str, str | None] = {}
        for named in self._named:
            found.update(await self._addresses(named))
        for address, server_name in found.items():
            if address not in self._targets:
                self._targets[address] = Target(address, server_name, self.security)
        for target in self:
            if target.address not in found and not target.in_flight and not target.ready:
                del self._targets[target.address]
                await target.close()

    async def _addresses(self, named: str) -> dict[str, str | None]:
        if not named.startswith(DNS):
            return {named: None}
        host, _, port = named.removeprefix(DNS).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            found = await asyncio.to_thread(resolve_host, host, int(port))
        except OSError as error:
            log.warning("%s cannot be looked up: %s", named, error.strerror or error)
            return {target.address: host for target in self}  # as they were
        return dict.fromkeys(found[:MAX_ADDRESSES], host)

    async def close(self) -> None:
        for target in self:
            await target.close()
