"""The command line of `ssd-client`: flags in, exit code out. The work is done elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console

from ssd_client.connection.endpoints import DEFAULT_ADDRESS, connect_one
from ssd_client.connection.failover import DEFAULT_STALL_S, RetryPolicy
from ssd_client.connection.security import Security
from ssd_client.errors import BadInputError, ClientError, EndpointLostError
from ssd_client.generate.api import Client, Stream
from ssd_client.generate.request import build_request
from ssd_client.generate.request_options import RequestOptions
from ssd_client.local.launcher import LocalFlags, LocalPlan, plan_local
from ssd_client.terminal import params, render
from ssd_client.terminal.options import (
    SectionedCommand,
    chat_options,
    grammar_options,
    local_options,
    output_options,
    prompt_options,
    sampling_options,
    serving_options,
    speculation_options,
    stop_options,
    url_option,
)
from ssd_client.terminal.prompt import PromptFlags, read_prompt
from ssd_client.terminal.security_options import security_options
from ssd_client.terminal.serving import check_local, check_url_alone, pick, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ssd_client.generate.telemetry import RootSpan
    from ssd_client.openai.gateway_client import GatewayClient

INTERRUPTED = 130


# Commands that are imported when they are asked for: a generation need not wait for them.
_LATER = {
    "bench": "ssd_client.bench.command",
    "chat": "ssd_client.chat.command",
    "compare": "ssd_client.compare",
    "models": "ssd_client.status.command",
    "race": "ssd_client.race.command",
    "report": "ssd_client.bench.report.report_command",
    "serve": "ssd_client.serve",
    "status": "ssd_client.status.command",
}


class _Program(click.Group):
    """Ends every failure with one line on stderr and the exit code that it stands for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER:
            return getattr(importlib.import_module(_LATER[cmd_name]), cmd_name)
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except click.ClickException as error:
            render.show_error(BadInputError(error.format_message()))
            code = error.exit_code
        except ClientError as error:
            render.show_error(error, _hint(error))
            code = error.exit_code
        except click.Abort:  # click's word for Ctrl-C
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


def _hint(error: ClientError) -> str:
    """What a newcomer may not know."""
    refused = isinstance(error, EndpointLostError) and "Connection refused" in error.reason
    return "; nobody listens there: --local starts a target and a draft here" if refused else ""


def _show_version(context: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    from importlib import metadata  # costs every command a fifth of its start-up

    try:
        click.echo(f"ssd-client {metadata.version('ssd-serve')}")
    except metadata.PackageNotFoundError:
        click.echo("ssd-client, run from its source tree")
    context.exit()


@click.group(
    cls=_Program,
    invoke_without_command=True,
    context_settings={
        "auto_envvar_prefix": "SSD_CLIENT",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Talks to SSD targets.

    Every option can also be set by an environment variable: --top-p of generate by
    SSD_CLIENT_GENERATE_TOP_P, --target of info by SSD_CLIENT_INFO_TARGET. A repeatable option takes
    several values from it, separated by spaces; --stop takes one from each line.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(cls=SectionedCommand)
@prompt_options
@chat_options
@sampling_options
@stop_options
@grammar_options
@speculation_options
@output_options
@serving_options
@url_option
@security_options
@click.option(
    "--otlp-endpoint",
    type=params.UTF8,
    metavar="URL",
    help="OpenTelemetry collector (OTLP over gRPC), such as http://127.0.0.1:4317, for a trace.",
)
@local_options
def generate(**flags: Any) -> None:
    """Continues PROMPT and streams the text to stdout.

    Without PROMPT, --prompt-file and --token-ids the prompt is read from stdin, exactly as it is.
    Options that are not given are left to the server. Statistics go to stderr.

    Exit codes: 0 finished, 1 failed, 2 bad input, 130 interrupted.
    """
    _check_generate(flags)
    plan = plan_local(pick(LocalFlags, flags)) if flags["local"] else None
    request = build_request(read_prompt(pick(PromptFlags, flags)), pick(RequestOptions, flags))
    notes = Console(stderr=True)
    output = _output(notes, flags)
    with (
        _client(notes, plan, flags) as client,
        _traced(flags) as span,
        client.send(request, span.metadata if span else ()) as events,
    ):
        _show(events, span, output)


@cli.command()
@click.option("--target", type=params.TARGET, default=DEFAULT_ADDRESS, show_default=True)
@click.option("--timeout", type=params.SECONDS, default=10.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@security_options
def info(target: str, timeout: float, as_json: bool, security: Security) -> None:
    """Shows what a target serves and within which bounds."""
    with connect_one(target, security) as endpoint:
        answer = endpoint.model_info(timeout)
    rows = render.model_info_json(answer)
    if as_json:
        render.write_json(rows)
    else:
        render.show_model_info(rows)


@contextlib.contextmanager
def _client(
    notes: Console, plan: LocalPlan | None, flags: dict[str, Any]
) -> Iterator[Client | GatewayClient]:
    """Who sends the request: to targets, or to a gateway."""
    if flags["url"] is not None:
        from ssd_client.openai.gateway_client import GatewayClient

        yield GatewayClient(flags["url"], flags["security"], flags["timeout"])
        return
    with serving(notes, flags["target"], plan, flags["security"]) as endpoints:
        stall_s = DEFAULT_STALL_S if flags["stall_timeout"] is None else flags["stall_timeout"]
        policy = RetryPolicy(retries=flags["retries"], stall_timeout_s=stall_s)
        yield Client.over(endpoints, flags["timeout"], policy)


def _traced(flags: dict[str, Any]) -> contextlib.AbstractContextManager[RootSpan | None]:
    if flags["otlp_endpoint"] is None:
        return contextlib.nullcontext()
    from ssd_client.generate.telemetry import root_span

    return root_span(flags["otlp_endpoint"])


def _show(events: Stream, span: RootSpan | None, output: render.Output) -> None:
    """Follows a generation to its end, and shows what arrived whatever ends it."""
    try:
        for event in span.see(events) if span else events:
            output.show(event)
    except (KeyboardInterrupt, SystemExit):
        output.end(events.result, "interrupted")
        raise
    except ClientError:
        output.end(events.result, "failed")
        raise
    output.end(events.result, None)


def _check_generate(flags: dict[str, Any]) -> None:
    check_local(flags)
    check_url_alone(flags)
    if (flags["logprobs"] or flags["top_logprobs"]) and not flags["as_json"]:
        raise BadInputError("log probabilities are part of the JSON output: add --json")
    if flags["otlp_endpoint"] is not None:
        from ssd_client.generate.telemetry import (
            check_otlp_endpoint,  # an extra, which nothing else needs
        )

        check_otlp_endpoint(flags["otlp_endpoint"])


def _output(notes: Console, flags: dict[str, Any]) -> render.Output:
    if flags["as_json"]:
        logprobs = flags["logprobs"] or flags["top_logprobs"] is not None
        return render.JsonOutput(notes, logprobs=logprobs)
    return render.TextOutput(notes, flags["mode"], flags["verification"])


def main() -> None:
    try:
        cli.main(prog_name="ssd-client")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _leave_at_once()
        raise


def _leave_at_once() -> NoReturn:
    """Threads that still wait for a response could keep the interpreter from its end."""
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
