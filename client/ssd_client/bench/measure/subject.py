"""What is measured: a target, its drafts, and the traces that they keep."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from ssd.v1 import target_pb2
from ssd_client.connection.drafts import draft_fields
from ssd_client.connection.endpoints import Endpoint, linked_drafts
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.speculation import MODES
from ssd_client.status.traces import TraceEvent, TraceReader
from ssd_client.terminal.render import model_info_json

_TIMEOUT_S = 10.0
_LINK_S = 10.0
_SETTLE_S = 0.2
_NEEDED = {
    "sync": "a draft model inside it: start it with --draft-model",
    "ssd": "a speculation endpoint: start it with --draft",
}


class Subject:
    def __init__(self, stack: contextlib.ExitStack, target: Endpoint, wait_for_links: bool) -> None:
        """Drafts are connected, too, where they can be reached from here."""
        self.target = target
        self.info = settled_info(target) if wait_for_links else target.model_info(_TIMEOUT_S)
        self.drafts: list[Endpoint] = []
        self.draft_infos: list[dict[str, Any]] = []
        self.unreached: list[str] = []  # drafts that the target has and this process has not
        for address in self._up():
            try:
                self._connect(stack, address)
            except (ClientError, ValueError) as error:  # an address as the target knows it
                self.unreached.append(str(error))

    def _connect(self, stack: contextlib.ExitStack, address: str) -> None:
        security = self.target.security.for_named_by_others()
        endpoint = Endpoint(address, linked_drafts(self.info)[address], security)
        draft = stack.enter_context(contextlib.closing(endpoint))
        self.draft_infos.append(_about(draft))
        self.drafts.append(draft)

    def look_again(self) -> None:
        """Drafts as they are now: a plane comes up with its link, and then carries rows."""
        for place, draft in enumerate(self.drafts):
            with contextlib.suppress(ClientError):
                self.draft_infos[place] = _about(draft)

    def _up(self) -> list[str]:
        return [each.address for each in self.info.speculation_endpoints if each.state == "up"]

    def offers(self, mode: str) -> bool:
        return MODES[mode] in self.info.speculation_modes

    def check_modes(self, modes: Sequence[str]) -> None:
        for mode in modes:
            if not self.offers(mode):
                raise BadInputError(
                    f"--mode {mode}: the target {self.target.address} has no such mode; it needs "
                    f"{_NEEDED[mode]}"
                )

    def devices(self, mode: str) -> int:
        """Devices that are at work in a mode."""
        own = max(1, self.info.tensor_parallel_size)
        return own + len(self._up()) if mode == "ssd" else own

    def about(self, command: str) -> dict[str, Any]:
        return {
            "command": command,
            "client": {
                "python": platform.python_version(),
                "system": platform.system(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
            },
            "target": {"address": self.target.address, **model_info_json(self.info)},
            "drafts": self.draft_infos,
        }


def _about(draft: Endpoint) -> dict[str, Any]:
    return {"address": draft.address, **draft_fields(draft.draft_info(_TIMEOUT_S))}


class Traces:
    """The traces of all services that keep one; `missing` says why the others have none."""

    def __init__(self, subject: Subject) -> None:
        self._readers: list[TraceReader] = []
        self.missing: list[str] = []
        for endpoint in (subject.target, *subject.drafts):
            try:
                self._readers.append(TraceReader(endpoint))
            except ClientError as error:
                self.missing.append(str(error))
        self.has_target = bool(self._readers) and self._readers[0].address == subject.target.address

    def take(self) -> list[TraceEvent]:
        return [event for reader in self._readers for event in reader.take()]

    def settled(self) -> list[TraceEvent]:
        """The same, when what a draft does beyond a request's end is over."""
        time.sleep(_SETTLE_S)
        return self.take()

    @property
    def lost(self) -> int:
        """Events that were gone when they were asked for."""
        return sum(reader.lost for reader in self._readers)


def command_line() -> str:
    """The command as it can be run again, without what is secret in it."""
    words = [re.sub(r"//[^/@]*@", "//", word) for word in sys.argv[1:]]
    return shlex.join(["ssd-client", *words])


def settled_info(target: Endpoint) -> target_pb2.GetModelInfoResponse:
    """The info once links have had the time to come up, or to say why they do not."""
    deadline = time.monotonic() + _LINK_S
    while True:
        info = target.model_info(_TIMEOUT_S)
        states = {each.state for each in info.speculation_endpoints}
        waiting = states & {"connecting", "waiting"}
        if not waiting or time.monotonic() > deadline:
            return info
        time.sleep(0.1)
