"""A gateway on this host, in front of a target."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator

from ssd_client.local.launcher import check_installed
from ssd_client.local.service import LocalService

NEEDS_GATEWAY = 'it needs the extras serve and gateway: pip install "ssd-serve[serve,gateway]"'
MODULES = ("ssd_gateway", "starlette", "uvicorn", "uvloop", "httptools", "msgspec")

_POLL_S = 0.05
_CHECK_S = 2.0


@contextlib.contextmanager
def local_gateway(target: str, listen: str) -> Iterator[LocalService]:
    """A gateway that takes requests for as long as the block runs.

    Enter it from a thread that lives as long as the block, as its LocalService says.
    """
    check_installed(MODULES, NEEDS_GATEWAY)
    service = LocalService(
        "ssd_gateway", ["--target", target], name="the gateway", listen=listen, needs=NEEDS_GATEWAY
    )
    with service:
        while not _is_ready(service.address):
            service.check_starting()
            time.sleep(_POLL_S)
        yield service


def _is_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=_CHECK_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
