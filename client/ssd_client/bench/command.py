"""`ssd-client bench`: flags in, files and a table out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ssd_client.bench.measure.delay_proxy import DelayProxy
from ssd_client.bench.measure.openai import check_baseline
from ssd_client.bench.measure.prompts import HUB_SETS, STORIES, load_prompts
from ssd_client.bench.measure.settings import MODES, Settings
from ssd_client.bench.measure.subject import Subject, command_line
from ssd_client.bench.report.report import write_report
from ssd_client.bench.report.results import check_extra, check_output
from ssd_client.bench.report.table import TerminalProgress, show_results
from ssd_client.bench.report.wandb_log import log_results
from ssd_client.bench.run import Bench
from ssd_client.errors import BadInputError, ClientError
from ssd_client.local.launcher import LocalPlan
from ssd_client.status.traces import write_perfetto
from ssd_client.terminal import params
from ssd_client.terminal.local_pair import pair_options, plan_pair
from ssd_client.terminal.options import SectionedCommand
from ssd_client.terminal.security_options import security_options
from ssd_client.terminal.serving import check_local, serving

TRACE_EVENTS = "200000"


@click.command(cls=SectionedCommand)
@click.option(
    "--target",
    type=params.TARGET,
    multiple=True,
    help="The target that is measured.  [default: 127.0.0.1:7410]",
)
@click.option(
    "--data",
    type=params.UTF8,
    default=STORIES,
    show_default=True,
    help='Prompts: a JSONL file of objects with "prompt", '
    f"{STORIES}, or a set from a hub: {', '.join(HUB_SETS)}.",
)
@click.option("--num-prompts", type=params.uint(least=1), default=8, show_default=True)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="Repeatable.  [default: all that the target has]",
)
@click.option(
    "--concurrency",
    type=params.UINTS,
    default="1",
    show_default=True,
    help="Requests at a time; several: 1,2,4.",
)
@click.option(
    "--request-rate",
    type=params.RATES,
    help="Requests a second instead, at random moments (Poisson); several: 0.5,2.",
)
@click.option("--repeat", "repeats", type=params.uint(least=1), default=3, show_default=True)
@click.option(
    "--warm-up", type=params.uint(), default=1, show_default=True, help="Requests in each mode."
)
@click.option("--max-tokens", type=params.uint(least=2), default=128, show_default=True)
@click.option("--temperature", type=params.NUMBER, default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Always --max-tokens tokens.")
@click.option("--json-schema", type=params.TEXT_FILE, help="Texts follow this schema.")
@click.option("--seed", type=params.uint(32), default=0, show_default=True)
@click.option("--depth", type=params.uint(least=1), help="Tokens of a speculation at most.")
@click.option("--chat/--no-chat", default=True, help="Prompts as a user's message, or as they are.")
@click.option(
    "--baseline",
    "baselines",
    type=params.Parsed(check_baseline, "openai:url"),
    multiple=True,
    help="Another server on the same prompts: openai:http://HOST:PORT/v1; repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON, after every run.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="And as a table.")
@click.option("--resume", is_flag=True, help="Go on with the runs that --out does not have yet.")
@click.option("--report", type=click.Path(path_type=Path), help="One HTML file with pictures.")
@click.option("--trace", type=click.Path(path_type=Path), help="A timeline for Perfetto.")
@click.option("--wandb", metavar="PROJECT", help="Log the results to Weights & Biases, too.")
@click.option(
    "--link-delay",
    type=params.MILLISECONDS,
    help="With --local: ssd once more, over links that are so slow in each direction; several: "
    "0,5,20.",
)
@security_options
@pair_options
def bench(**flags: Any) -> None:
    """Measures off, sync and ssd on the same prompts and seeds, in turns.

    Also checks that the modes give the same texts. Exit codes: 0 done, 1 failed or texts differ,
    2 bad input, 130 interrupted (what was done is in --out, --resume goes on).
    """
    _check(flags)
    notes = Console(stderr=True)
    proxy = DelayProxy() if flags["link_delay"] else None
    plan = _plan(flags, proxy) if flags["local"] else None
    prompts = load_prompts(flags["data"], flags["num_prompts"], flags["seed"])
    progress = TerminalProgress(notes)
    if len(prompts.prompts) < flags["num_prompts"]:
        progress.note(f"{prompts.name} has {len(prompts.prompts)} prompts")
    with contextlib.ExitStack() as stack:
        endpoints = stack.enter_context(serving(notes, flags["target"], plan, flags["security"]))
        subject = Subject(stack, endpoints[0], "ssd" in (flags["modes"] or MODES))
        settings = _settings(flags, subject)
        subject.check_modes(settings.modes)
        others = _others(flags, prompts.prompts)
        running = Bench(subject, settings, prompts, others, progress, command_line())
        for line in subject.unreached:
            progress.note(f"a draft of the target is out of reach from here: {line}")
        for line in running.traces.missing if flags["report"] or flags["trace"] else ():
            progress.note(f"no timeline: {line}")
        try:
            running.run(flags["out"], flags["resume"])
            if proxy is not None:
                running.delay_curve(proxy, flags["link_delay"], flags["out"])
        finally:
            _show(flags, running, progress)
        if flags["wandb"] is not None:
            log_results(running.results.as_json(), flags["wandb"])
    if running.results.failed or running.results.more.get("equality", {}).get("differences"):
        raise SystemExit(1)


def _check(flags: dict[str, Any]) -> None:
    check_local(flags)
    if len(flags["target"]) > 1:
        raise BadInputError("--target: one target is measured at a time")
    if flags["resume"] and flags["out"] is None:
        raise BadInputError("--resume needs --out, the file to go on with")
    for name in ("out", "csv_file", "report", "trace"):
        if flags[name] is not None:
            check_output(f"--{name.split('_')[0]}", flags[name])
    if flags["temperature"] < 0:
        raise BadInputError(f"--temperature: 0 or more is needed, got {flags['temperature']:g}")
    if flags["json_schema"] is not None:
        _check_schema(flags)
    if flags["request_rate"] and flags["concurrency"] != (1,):
        raise BadInputError("--request-rate has no --concurrency: requests come when they come")
    if flags["link_delay"] and (not flags["local"] or "ssd" not in (flags["modes"] or MODES)):
        raise BadInputError("--link-delay needs --local and mode ssd: it slows that link down")
    for name, module in (("report", "matplotlib"), ("wandb", "wandb")):
        if flags[name] is not None:
            check_extra(name, module)


def _check_schema(flags: dict[str, Any]) -> None:
    if flags["ignore_eos"]:
        raise BadInputError("--ignore-eos: a text that follows --json-schema ends where that says")
    try:
        json.loads(flags["json_schema"])
    except ValueError as error:
        raise BadInputError(f"--json-schema is no JSON: {error}") from None


def _settings(flags: dict[str, Any], subject: Subject) -> Settings:
    names = {each.name for each in dataclasses.fields(Settings)} & set(flags)
    given = {name: flags[name] for name in names}
    for name in ("modes", "concurrency", "request_rate", "baselines"):
        given[name] = tuple(dict.fromkeys(flags[name] or ()))
    given["modes"] = given["modes"] or tuple(mode for mode in MODES if subject.offers(mode))
    return Settings(**given)


def _others(flags: dict[str, Any], timed: tuple[str, ...]) -> list[str]:
    """Prompts of the same kind that are not timed; the timed ones where there are no others."""
    more = load_prompts(flags["data"], flags["num_prompts"] + 64, flags["seed"] + 1).prompts
    others = [prompt for prompt in more if prompt not in timed]
    return (others or list(timed))[: max(4, flags["warm_up"])]


def _plan(flags: dict[str, Any], proxy: DelayProxy | None) -> LocalPlan:
    modes = flags["modes"] or MODES
    plan = plan_pair(flags, modes, named=bool(flags["modes"]))
    traced = ("--trace-events", TRACE_EVENTS)
    return dataclasses.replace(
        plan,
        target_flags=(*traced, *plan.target_flags),
        draft_flags=(*traced, *plan.draft_flags),
        through=plan.through if proxy is None else proxy.to,
    )


def _show(flags: dict[str, Any], running: Bench, progress: TerminalProgress) -> None:
    """The table first: whatever may be wrong with a file, it was measured."""
    results = running.results
    if not results.runs:
        return
    show_results(results)
    if running.traces.lost:
        progress.note(f"{running.traces.lost} events of the traces are lost: raise --trace-events")
    files: list[tuple[Path | None, Callable[[Path], None]]] = [
        (flags["csv_file"], results.save_csv),
        (flags["trace"], partial(write_perfetto, running.timeline)),
        (flags["report"], partial(write_report, results.as_json())),
    ]
    for path, write in files:
        if path is not None:
            try:
                write(path)
            except ClientError as error:
                progress.note(str(error))
