"""What --local starts: a real target on this machine, and a draft beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

from ssd_client.errors import BadInputError, ClientError, EndpointLostError
from ssd_client.local.fit import DEPTHS, choose_fit, forward_bytes
from ssd_client.local.heads import is_head
from ssd_client.local.mps import DRAFT_SHARE, mps_daemon, share_variables
from ssd_client.local.service import NEEDS_SERVE, LocalService, wait_until_ready

DEFAULT_MODEL = "stories-target"
DEFAULT_DRAFTS = {DEFAULT_MODEL: "stories-draft"}  # by target
NO_DRAFT = "none"
DEVICES = ("auto", "cpu", "cuda")  # values of the services' --device


@dataclass(frozen=True)
class LocalFlags:
    """What the command line says about the local services; None where it says nothing."""

    local_model: str | None = None
    local_draft: str | None = None
    local_device: str | None = None
    local_draft_device: str | None = None
    local_mps: bool = False
    local_draft_share: int | None = None  # percent
    local_expand_to: str | None = None
    local_draft_expand_to: str | None = None
    mode: str | None = None
    draft: Sequence[str] = ()
    depth: int | None = None


@dataclass(frozen=True)
class LocalPlan:
    model: str
    draft: str | None = None  # the model of a draft service
    target_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    mps: bool = False  # they share a GPU at the same time
    draft_share: int = 100  # percent of that GPU; the target gets the rest, or all if this is all
    through: Callable[[str], str] = lambda address: address  # how the target reaches its draft
    note: str = ""  # on what was chosen, for the user


def plan_local(flags: LocalFlags) -> LocalPlan:
    """Which services to start, and how; BadInputError where the flags contradict each other."""
    _check_mps(flags)
    plan = _plan_models(flags)
    device = _device_flags(flags.local_device)
    plan = dataclasses.replace(plan, target_flags=(*plan.target_flags, *device))
    if plan.draft is None:
        _check_no_draft(flags)
        return plan
    draft_flags = _device_flags(flags.local_draft_device or flags.local_device)
    if is_head(plan.draft):
        draft_flags += ("--target-model", plan.model)
    plan = dataclasses.replace(plan, draft_flags=draft_flags)
    return _share_gpu(flags, plan) if flags.local_mps else plan


def _share_gpu(flags: LocalFlags, plan: LocalPlan) -> LocalPlan:
    """Both on one GPU at the same time; what the flags leave open is what fits."""
    share, sizes = flags.local_draft_share, _forward_bytes(flags, plan)
    if share is not None or sizes is None:
        return dataclasses.replace(plan, mps=True, draft_share=share or DRAFT_SHARE)
    fit = choose_fit(*sizes, DEPTHS if flags.depth is None else (flags.depth,))
    depth = flags.depth if fit is None else fit.depth
    if depth is not None:
        target_flags = (*plan.target_flags, "--depth", str(depth))
        plan = dataclasses.replace(plan, target_flags=target_flags)
    if fit is None and flags.mode != "ssd":
        return _draft_inside(plan)
    return dataclasses.replace(plan, mps=True, draft_share=fit.share if fit else DRAFT_SHARE)


def _draft_inside(plan: LocalPlan) -> LocalPlan:
    return LocalPlan(
        plan.model,
        None,
        (*plan.target_flags, "--draft-model", str(plan.draft)),
        note=f"one GPU has no room for {plan.draft} beside {plan.model}: it drafts inside the "
        "target, in turns with it (mode sync)",
    )


def _forward_bytes(flags: LocalFlags, plan: LocalPlan) -> tuple[int, int] | None:
    """The sizes of target and draft; None where they are not known."""
    if plan.draft is None or flags.local_expand_to or flags.local_draft_expand_to:
        return None
    target, draft = forward_bytes(plan.model), forward_bytes(plan.draft)
    return None if target is None or draft is None else (target, draft)


def _plan_models(flags: LocalFlags) -> LocalPlan:
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


def _device_flags(device: str | None) -> tuple[str, ...]:
    """None leaves it to the service, whose own variable may say where."""
    return () if device is None else ("--device", device)


def _check_mps(flags: LocalFlags) -> None:
    if not flags.local_mps:
        if flags.local_draft_share is not None:
            raise BadInputError("--local-draft-share needs --local-mps")
        return
    devices = {
        "--local-device": flags.local_device,
        "--local-draft-device": flags.local_draft_device,
    }
    for name, device in devices.items():
        if device == "cpu":
            raise BadInputError(f"--local-mps has both on one GPU: leave {name} cpu out")


def _check_no_draft(flags: LocalFlags) -> None:
    """What is said of a draft process needs one; only --mode off, to compare with, ignores it."""
    given = {"--local-draft-device": flags.local_draft_device, "--local-mps": flags.local_mps}
    name = next((name for name, value in given.items() if value), None)
    if name is None or flags.mode == "off":
        return
    if flags.mode == "sync":
        raise BadInputError(f"{name}: with --mode sync the draft model is in the target's process")
    if flags.draft:
        raise BadInputError(f"{name} is for a draft that --local starts, not for --draft")
    raise BadInputError(f"{name} needs a draft: name its model by --local-draft")


class LocalTarget:
    """Context manager around `ssd-target serve MODEL`; `address` once it is ready.

    Where the plan has a draft, its service is started beside it, and both load at the same time.
    `cores` and `draft_cores` are all that the services run on. Enter it from a thread that lives as
    long as the block: on Linux the services are stopped with the thread that started them.
    `on_phase` is told "starting", "loading" and "ready".
    """

    def __init__(
        self,
        plan: LocalPlan,
        *,
        cores: Collection[int] | None = None,
        draft_cores: Collection[int] | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.address = ""
        self.startup_s = 0.0
        self._plan = plan
        self._cores, self._draft_cores = cores, draft_cores
        self._on_phase = on_phase

    def __enter__(self) -> LocalTarget:
        drafts = ["ssd_draft"] if self._plan.draft else []
        check_installed(["ssd_target", *drafts, "torch"], NEEDS_SERVE)
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

    def check_running(self) -> None:
        """Raises ClientError once the target is gone; it goes on without its draft."""
        self._target.check_running()

    def _start(self, stack: contextlib.ExitStack) -> list[LocalService]:
        """The services, listening but not ready, the target last: it is told where its draft is."""
        plan, services = self._plan, []
        flags = list(plan.target_flags)
        shared = stack.enter_context(mps_daemon()) if plan.mps else {}
        if plan.draft:
            draft = LocalService(
                "ssd_draft",
                [plan.draft, *plan.draft_flags],
                name=f"draft {plan.draft}",
                environment={**shared, **share_variables(plan.draft_share)},
                cores=self._draft_cores,
            )
            shared = {**shared, **share_variables(100 - plan.draft_share or 100)}
            services.append(stack.enter_context(draft))
            address = plan.through(draft.address)
            flags += ["--draft", address, "--trust-draft", address]
        target = LocalService(
            "ssd_target",
            [plan.model, *flags],
            name=plan.model,
            environment=shared,
            cores=self._cores,
        )
        services.append(stack.enter_context(target))
        for each in services:
            stack.callback(each.ask_to_stop)
        return services


def check_installed(modules: Sequence[str], needs: str) -> None:
    """Raises ClientError unless this interpreter can import all of them; imports nothing."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise ClientError(needs)
