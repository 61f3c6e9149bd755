"""What --local starts: a real target on this machine, and a draft beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ssd_client.errors import BadInputError, ClientError, EndpointLostError
from ssd_client.local_service import NEEDS_SERVE, LocalService, wait_until_ready

DEFAULT_MODEL = "stories-target"
DEFAULT_DRAFTS = {DEFAULT_MODEL: "stories-draft"}  # by target
NO_DRAFT = "none"


@dataclass(frozen=True)
class LocalFlags:
    """What the command line says about the local services; None where it says nothing."""

    local_model: str | None = None
    local_draft: str | None = None
    mode: str | None = None
    draft: Sequence[str] = ()


@dataclass(frozen=True)
class LocalPlan:
    model: str
    draft: str | None = None  # the model of a draft service
    target_flags: tuple[str, ...] = ()


def plan_local(flags: LocalFlags) -> LocalPlan:
    """Which services to start, and how; BadInputError where the flags contradict each other."""
    model = flags.local_model or DEFAULT_MODEL
    draft = flags.local_draft or DEFAULT_DRAFTS.get(model, NO_DRAFT)
    named = tuple(word for address in flags.draft for word in ("--draft", address))
    if flags.mode == "off":
        return LocalPlan(model, None, named)
    if flags.mode == "sync":
        if draft == NO_DRAFT:
            raise BadInputError("--local --mode sync needs a draft model: name it by --local-draft")
        return LocalPlan(model, None, (*named, "--draft-model", draft))
    if named:
        if flags.local_draft not in (None, NO_DRAFT):
            raise BadInputError(
                "either --local-draft starts a draft or --draft names one, not both"
            )
        return LocalPlan(model, None, named)
    if flags.mode == "ssd" and draft == NO_DRAFT:
        raise BadInputError("--local --mode ssd needs a draft: --local-draft MODEL or --draft")
    return LocalPlan(model, None if draft == NO_DRAFT else draft)


class LocalTarget:
    """Context manager around `ssd-target serve MODEL`; `address` once it is ready.

    With `draft`, a draft service of that model is started beside it, and both load at the same
    time. Enter it from a thread that lives as long as the block: on Linux the services are stopped
    with the thread that started them. `on_phase` is told "starting", "loading" and "ready".
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        draft: str | None = None,
        flags: Sequence[str] = (),
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.address = ""
        self.startup_s = 0.0
        self._model = model
        self._draft = draft
        self._flags = flags
        self._on_phase = on_phase

    def __enter__(self) -> LocalTarget:
        check_installed("ssd_target", *(["ssd_draft"] if self._draft else []))
        begun = time.monotonic()
        self._on_phase("starting")
        with contextlib.ExitStack() as stack:
            services = self._start(stack)
            self._on_phase("loading")
            wait_until_ready(services)
            self._target = services[-1]
            self._stack = stack.pop_all()
        self.address = self._target.address
        self.startup_s = time.monotonic() - begun
        self._on_phase("ready")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            if isinstance(error, EndpointLostError) and self._target.has_died():
                raise ClientError(self._target.last_words()) from error

    def _start(self, stack: contextlib.ExitStack) -> list[LocalService]:
        """The services, listening but not ready, the target last: it is told where its draft is."""
        services = []
        flags = list(self._flags)
        if self._draft:
            draft = LocalService("ssd_draft", self._draft, name=f"draft {self._draft}")
            services.append(stack.enter_context(draft))
            flags += ["--draft", draft.address, "--trust-draft", draft.address]
        target = LocalService("ssd_target", self._model, flags)
        services.append(stack.enter_context(target))
        for each in services:
            stack.callback(each.ask_to_stop)
        return services


def check_installed(*services: str) -> None:
    """ClientError unless this interpreter can import what they need; imports nothing."""
    for module in (*services, "torch"):
        if importlib.util.find_spec(module) is None:
            raise ClientError(NEEDS_SERVE)
