"""What is measured: a target, its drafts, and the traces that they keep."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from ssd.v1 import target_pb2
from ssd_client.endpoints import Endpoint
from ssd_client.errors import BadInputError, ClientError
from ssd_client.render import model_info_json
from ssd_client.speculation import MODES
from ssd_client.traces import TraceEvent, TraceReader

_TIMEOUT_S = 10.0
_NEEDED = {
    "sync": "a draft model inside it: start it with --draft-model",
    "ssd": "a speculation endpoint: start it with --draft",
}


class Subject:
    def __init__(self, stack: contextlib.ExitStack, target: Endpoint) -> None:
        """Drafts are connected, too, where they can be reached from here."""
        self.target = target
        self.info: target_pb2.GetModelInfoResponse = target.model_info(_TIMEOUT_S)
        self.drafts: list[Endpoint] = []
        self.draft_infos: list[dict[str, Any]] = []
        for each in self.info.speculation_endpoints:
            if each.state != "up":
                continue
            draft = stack.enter_context(contextlib.closing(Endpoint(each.address)))
            with contextlib.suppress(ClientError):
                info = draft.draft_info(_TIMEOUT_S)
                fields = {field.name: getattr(info, field.name) for field in info.DESCRIPTOR.fields}
                self.draft_infos.append({"address": each.address, **fields})
                self.drafts.append(draft)

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
        """That are at work in a mode."""
        own = max(1, self.info.tensor_parallel_size)
        return own + len(self.info.speculation_endpoints) if mode == "ssd" else own

    def about(self, command: Sequence[str]) -> dict[str, Any]:
        return {
            "command": " ".join(command),
            "client": {
                "python": platform.python_version(),
                "system": platform.system(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
            },
            "target": {"address": self.target.address, **model_info_json(self.info)},
            "drafts": self.draft_infos,
        }


class Traces:
    """Of all services that keep one; `missing` says of which there is none, and why."""

    def __init__(self, subject: Subject) -> None:
        self._readers: list[TraceReader] = []
        self.missing: list[str] = []
        for endpoint in (subject.target, *subject.drafts):
            try:
                self._readers.append(TraceReader(endpoint))
            except ClientError as error:
                self.missing.append(str(error))
        self.has_target = bool(self._readers) and self._readers[0].address == subject.target.address
        self.has_drafts = len(self._readers) > self.has_target

    def take(self) -> list[TraceEvent]:
        return [event for reader in self._readers for event in reader.take()]

    @property
    def clock_errors_s(self) -> list[float]:
        return [reader.offset.error_s for reader in self._readers]


def command_line() -> list[str]:
    return ["ssd-client", *sys.argv[1:]]
