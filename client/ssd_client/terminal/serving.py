"""Where a command's requests go: targets that run, or one that is started for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console

from ssd_client.connection.endpoints import DEFAULT_ADDRESS, Endpoints, connect
from ssd_client.connection.security import PLAIN, Security
from ssd_client.errors import BadInputError
from ssd_client.local.launcher import LocalPlan, LocalTarget
from ssd_client.terminal import render

_Flags = TypeVar("_Flags")


def check_local(flags: Mapping[str, Any]) -> None:
    """Flags of --local need it, and contradict --target."""
    if flags["local"] and flags["target"]:
        raise BadInputError("--local starts a target of its own: leave --target out")
    for name, value in flags.items():
        if name.startswith("local_") and value not in (None, False) and not flags["local"]:
            raise BadInputError(f"--{name.replace('_', '-')} needs --local")


def check_url_alone(flags: Mapping[str, Any]) -> None:
    """--url contradicts other ways to a target; who goes on where is the gateway's business."""
    if flags["url"] is None:
        return
    for name in ("target", "local", "retries", "stall_timeout"):
        if flags.get(name) not in (None, False, ()):
            raise BadInputError(
                f"--{name.replace('_', '-')}: not with --url, leave one of them out"
            )


def pick(kind: type[_Flags], flags: Mapping[str, Any]) -> _Flags:
    """A dataclass or a typed dictionary, from the flags that have its names; others keep their
    defaults."""
    return kind(**{name: flags[name] for name in kind.__annotations__ if name in flags})


@contextlib.contextmanager
def serving(
    notes: Console, targets: Sequence[str], plan: LocalPlan | None, security: Security = PLAIN
) -> Iterator[Endpoints]:
    """The endpoints of the command, a target started for it included."""
    with contextlib.ExitStack() as stack:
        addresses = targets or (DEFAULT_ADDRESS,)
        if plan is not None:
            if security != PLAIN:
                raise BadInputError("--local needs neither TLS nor a token: leave them out")
            addresses = (start_local(stack, notes, plan).address,)
        yield stack.enter_context(connect(addresses, security))


def start_local(stack: contextlib.ExitStack, notes: Console, plan: LocalPlan) -> LocalTarget:
    """A target that runs until the stack is left; the user is told how far it is."""
    if plan.note:
        render.note(notes, plan.note)
    title = f"{plan.model} with {plan.draft}" if plan.draft else plan.model
    with render.startup_status(notes, title) as on_phase:
        target = stack.enter_context(LocalTarget(plan, on_phase=on_phase))
    render.note(notes, f"{title} ready after {target.startup_s:.1f} s")
    return target
