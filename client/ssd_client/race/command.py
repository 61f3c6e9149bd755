"""`ssd-client race`: the same text in every mode, one after the other."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

from ssd_client.bench.measure.settings import MODES
from ssd_client.bench.measure.subject import settled_info
from ssd_client.connection.endpoints import DEFAULT_ADDRESS, Endpoint, connect_one
from ssd_client.connection.security import PLAIN
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.api import Client
from ssd_client.generate.events import Tokens
from ssd_client.generate.request import ChatPrompt, TextPrompt
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.speculation import MODES as MODE_NUMBERS
from ssd_client.local.launcher import LocalPlan, LocalTarget
from ssd_client.race.lanes import Lane, Run, differing, verdict
from ssd_client.race.screen import Columns, PlainRaceScreen, RaceScreen
from ssd_client.terminal import params, render
from ssd_client.terminal.local_pair import pair_options, plan_pair, target_flags
from ssd_client.terminal.options import SectionedCommand, sampling_options
from ssd_client.terminal.prompt import LOCAL_DEFAULT
from ssd_client.terminal.security_options import security_options
from ssd_client.terminal.serving import check_local, pick

DIFFERENT = 1
BOTH_CORES = Lane("off", "the target on both cores", "off on both")
_WARM_UP = "Once upon a time"
_WARM_UP_TOKENS = {"off": 8, "sync": 64, "ssd": 128}  # until it is known what pays


@dataclass(frozen=True)
class RaceEntry:
    """Lanes that one set of services runs; the services are up for as long as they do."""

    lanes: Sequence[Lane]
    services: Callable[[Callable[[str], None]], contextlib.AbstractContextManager[Endpoint]]


@click.command(cls=SectionedCommand)
@click.argument("prompt", required=False, type=params.UTF8)
@click.option("--target", type=params.TARGET, help=f"Who runs.  [default: {DEFAULT_ADDRESS}]")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="Modes that run; repeatable.  [default: all that the target has]",
)
@click.option("--chat/--no-chat", default=True, help="PROMPT as a user's message, or as it is.")
@click.option("--max-tokens", type=params.uint(least=2), default=96, show_default=True)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@security_options
@pair_options
def race(**flags: Any) -> None:
    """Tells one text in every mode, one after the other, side by side on the screen.

    With --local on a CPU the target has one core and the draft another, in every mode; plain
    decoding is told on both cores, too.

    Exit codes: 0 all texts are equal, 1 they differ, or a failure, 2 bad input.
    """
    check_local(flags)
    notes = Console(stderr=True)
    heats = _local_heats(flags) if flags["local"] else [_target_heat(flags)]
    runs = [Run(lane) for heat in heats for lane in heat.lanes]
    prompt = flags["prompt"] or LOCAL_DEFAULT
    asked = ChatPrompt((("user", prompt),)) if flags["chat"] else TextPrompt(prompt)
    options = _options(flags)
    headline = f"{prompt}  (seed {options['seed']})"
    with _screen(notes, headline, runs) as screen:
        waiting = iter(runs)
        for heat in heats:
            _run_heat(heat, [next(waiting) for _ in heat.lanes], asked, options, screen)
    _say(flags["as_json"], notes.is_terminal, runs, options["seed"])
    if differing(runs) is not None:
        raise SystemExit(DIFFERENT)


def _options(flags: dict[str, Any]) -> RequestOptions:
    """One seed for all, whoever drew it."""
    seed = secrets.randbits(32) if flags["seed"] is None else flags["seed"]
    return pick(RequestOptions, {**flags, "seed": seed})


def _screen(notes: Console, headline: str, runs: Sequence[Run]) -> RaceScreen:
    return Columns(notes, headline, runs) if notes.is_terminal else PlainRaceScreen(notes, headline)


def _run_heat(
    heat: RaceEntry,
    runs: Sequence[Run],
    asked: ChatPrompt | TextPrompt,
    options: RequestOptions,
    screen: RaceScreen,
) -> None:
    def tell(phase: str) -> None:
        for run in runs:
            run.state = f"{phase} …"

    with heat.services(tell) as endpoint:
        client = Client.over([endpoint])
        tell("waiting")
        for run in runs:
            run.state = "warming up …"
            warm: RequestOptions = {
                **options,
                "max_tokens": _WARM_UP_TOKENS[run.lane.mode],
                "mode": run.lane.mode,
            }
            client.generate(_WARM_UP, **warm)
            _tell(client, run, asked, {**options, "mode": run.lane.mode}, screen)


def _tell(
    client: Client,
    run: Run,
    asked: ChatPrompt | TextPrompt,
    options: RequestOptions,
    screen: RaceScreen,
) -> None:
    with client.stream(asked, **options) as events:
        run.result = events.result
        for event in events:
            if isinstance(event, Tokens):
                run.take(event)
    screen.finish(run)


def _target_heat(flags: dict[str, Any]) -> RaceEntry:
    """A target that runs: in the modes that it has."""
    address, security = flags["target"] or DEFAULT_ADDRESS, flags["security"]
    with connect_one(address, security) as endpoint:
        offered = settled_info(endpoint).speculation_modes
    have = [mode for mode in MODES if MODE_NUMBERS[mode] in offered]
    for mode in flags["modes"]:
        if mode not in have:
            raise BadInputError(f"--mode {mode}: {address} has {', '.join(have)}")
    lanes = [Lane(mode) for mode in (_ordered(flags["modes"]) or have)]
    return RaceEntry(lanes, lambda tell: connect_one(address, security))


def _ordered(modes: Sequence[str]) -> list[str]:
    return [mode for mode in MODES if mode in modes]


def _local_heats(flags: dict[str, Any]) -> list[RaceEntry]:
    if flags["security"] != PLAIN:
        raise BadInputError("--local needs neither TLS nor a token: leave them out")
    modes = _ordered(flags["modes"]) or list(MODES)
    plan = plan_pair(flags, modes, named=bool(flags["modes"]))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if flags["local_device"] != "cpu" or len(cores) < 2:
        missing = [mode for mode in modes if mode == "ssd" and plan.draft is None]
        lanes = [Lane(mode) for mode in modes if mode not in missing]
        return [RaceEntry(lanes, lambda tell: _started(plan, None, None, tell))]
    one, other = cores[:2]
    where = {
        "off": f"the target on core {one}",
        "sync": f"target and draft in turns on core {one}",
        "ssd": f"the target on core {one}, the draft on core {other}",
    }
    heats = [
        RaceEntry(
            [Lane(mode, where[mode], "off on one core" if mode == "off" else "") for mode in modes],
            lambda tell: _started(plan, {one}, {other}, tell),
        )
    ]
    if "off" in modes:
        both = ("--device", "cpu", "--threads", "2")  # none is left to the front process
        alone = LocalPlan(plan.model, None, (*both, *target_flags(flags)))
        heats.append(
            RaceEntry([BOTH_CORES], lambda tell: _started(alone, {one, other}, None, tell))
        )
    return heats


@contextlib.contextmanager
def _started(
    plan: LocalPlan,
    cores: set[int] | None,
    draft_cores: set[int] | None,
    tell: Callable[[str], None],
) -> Iterator[Endpoint]:
    with (
        LocalTarget(plan, cores=cores, draft_cores=draft_cores, on_phase=tell) as target,
        connect_one(target.address) as endpoint,
    ):
        states = {each.state for each in settled_info(endpoint).speculation_endpoints}
        if plan.draft is not None and states != {"up"}:
            raise ClientError(f"the draft is {', '.join(states)}: there is nobody to race with")
        yield endpoint


def _say(as_json: bool, in_columns: bool, runs: Sequence[Run], seed: int) -> None:
    """What columns have shown is not said again."""
    text = runs[0].result.text if runs[0].result else ""
    if as_json:
        equal = differing(runs) is None
        lanes = {run.lane.name: run.as_json() for run in runs}
        render.write_json({"seed": seed, "equal": equal, "lanes": lanes, "text": text})
        return
    if not in_columns:
        render.write_stdout(f"{text}\n\n")
    render.write_stdout(verdict(runs) + "\n")
