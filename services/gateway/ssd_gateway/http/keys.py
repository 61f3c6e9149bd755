"""Who calls: keys are the tokens of the other services, and are passed on to the targets."""

import logging
from dataclasses import replace

from starlette.requests import Request

from ssd_client.connection.security import Security, is_loopback
from ssd_engine.errors import ConfigError
from ssd_gateway.config import GatewayConfig
from ssd_gateway.http.errors import ApiError
from ssd_gateway.http.request_headers import is_printable
from ssd_gateway.targets.pool import TargetPool
from ssd_gateway.targets.target import Metadata, Target
from ssd_serving.rpc.status import Unauthenticated
from ssd_serving.security.access import Access
from ssd_serving.security.allowances import Allowance
from ssd_serving.security.tokens import load_tokens

log = logging.getLogger(__name__)

GENERATE = "/ssd.v1.TargetService/Generate"
OBSERVE = "/ssd.v1.TraceService/GetTrace"


def check_limits(config: GatewayConfig) -> None:
    """Raises ConfigError for limits that would hold nowhere: targets hold callers to them, by the
    keys that they are shown."""
    if config.token_file is None or config.pass_keys:
        return
    tokens = load_tokens(config.token_file)
    limited = next((each.name for each in tokens if each.allowance != Allowance()), None)
    if limited is not None:
        raise ConfigError(
            f"--no-pass-keys: the limits of {limited!r} in --token-file {config.token_file} would "
            "hold nowhere, as targets hold callers to them: take them out, or pass keys on"
        )


class Keys:
    def __init__(self, access: Access, pool: TargetPool, guarded: bool, passes_on: bool) -> None:
        """``guarded``: callers need a key, or the port is open to more than this host.
        ``passes_on``: callers' keys are shown to targets."""
        self._access, self._pool, self._guarded = access, pool, guarded
        self._passes_on = passes_on
        self._said: set[str] = set()  # targets that get no keys, and of which that was said

    def check(self, request: Request, method: str = GENERATE) -> None:
        """Raises what a caller without the key for it gets."""
        shown = _metadata(request)
        self._access.check(method, shown)
        if not all(is_printable(value) for _, value in shown):
            raise Unauthenticated("the key has characters beyond printable ASCII: no key has them")
        if not self._guarded:
            _check_host(request)

    def metadata_for(self, request: Request, target: Target) -> Metadata:
        """What a call for this caller shows a target: the caller's key where keys are passed on,
        else the gateway's own. Keys travel in the clear to this host alone, unless the operator
        says otherwise."""
        shown, security = _metadata(request), self._pool.security
        if not (shown and self._passes_on):
            return security.metadata(target.address)
        host = target.address.rpartition(":")[0]
        if security.tls or security.insecure or is_loopback(host):
            return shown
        if target.address not in self._said:
            self._said &= {each.address for each in self._pool}  # pods come and go
            self._said.add(target.address)
            log.warning(
                "callers' keys are not passed on to %s, which is reached in the clear; give "
                "--target-tls-ca or --insecure if it asks for them",
                target.address,
            )
        return ()

    def security_for(self, request: Request, target: Target) -> Security:
        """How a connection for this caller alone reaches a target: as the pool's do, with what
        calls for the caller show."""
        shown = dict(self.metadata_for(request, target)).get("authorization", "")
        scheme, _, token = shown.partition(" ")
        is_token = scheme.lower() == "bearer" and bool(token.strip())
        return replace(self._pool.security, token=token.strip() if is_token else None)


def _metadata(request: Request) -> Metadata:
    shown = request.headers.get("authorization")
    return () if shown is None else (("authorization", shown),)


def _check_host(request: Request) -> None:
    """A page of a stranger can make a browser call this host by another name."""
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name):
        raise ApiError(
            403,
            f"Host {host!r} is not this host: keys (--token-file) or TLS are "
            "needed to be called by other names",
            code="unknown_host",
        )
