"""`ssd-client serve`: a target, its draft and a gateway on this host, until Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import click
from rich.console import Console

from ssd_client.local.gateway import MODULES, NEEDS_GATEWAY, local_gateway
from ssd_client.local.launcher import LocalPlan, check_installed
from ssd_client.terminal import params, render
from ssd_client.terminal.local_pair import pair_service_options, plan_pair
from ssd_client.terminal.options import SectionedCommand
from ssd_client.terminal.serving import start_local

DEFAULT_LISTEN = "127.0.0.1:8000"
MODES = ("off", "sync", "ssd")
SERVING = ("ssd_target", "ssd_draft", "torch", *MODULES)
TRACE_EVENTS = "20000"  # that each service keeps: minutes of the page's timeline


@click.command(cls=SectionedCommand)
@click.option(
    "--listen",
    type=params.LISTEN,
    default=DEFAULT_LISTEN,
    show_default=True,
    help="HOST:PORT of the HTTP service; port 0 takes a free one.",
)
@pair_service_options
def serve(**flags: Any) -> None:
    """Serves OpenAI's API and a page on this host: a target, a draft and a gateway, until Ctrl-C.

    Prints the address on stdout once requests are taken. The gateway's own options are its
    environment variables: SSD_GATEWAY_TOKEN_FILE and others.

    Exit codes: 0 ended by Ctrl-C, 1 failed, 2 bad input.
    """
    check_installed(SERVING, NEEDS_GATEWAY)
    plan, notes = _plan(flags), Console(stderr=True)
    with contextlib.ExitStack() as stack:
        target = start_local(stack, notes, plan)
        gateway = stack.enter_context(local_gateway(target.address, flags["listen"]))
        click.echo(f"http://{gateway.address}")
        render.note(notes, "a page for the browser, and OpenAI's API below /v1; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                gateway.check_running()
                target.check_running()


def _plan(flags: dict[str, Any]) -> LocalPlan:
    """Every mode is possible, and both services keep what the page's timeline shows."""
    plan = plan_pair({**flags, "depth": None}, MODES, named=False)
    traced = ("--trace-events", TRACE_EVENTS)
    return dataclasses.replace(
        plan,
        target_flags=(*traced, *plan.target_flags),
        draft_flags=(*traced, *plan.draft_flags),
    )
