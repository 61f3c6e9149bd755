"""The command line of `ssd-client`: flags in, exit code out. The work is done elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from ssd_client import params, render, stream
from ssd_client.endpoints import DEFAULT_ADDRESS, Endpoint, connect
from ssd_client.errors import BadInputError, ClientError
from ssd_client.failover import RetryPolicy
from ssd_client.local import (
    DEFAULT_DRAFTS,
    DEFAULT_MODEL,
    DEVICES,
    NO_DRAFT,
    LocalFlags,
    LocalPlan,
    LocalTarget,
    plan_local,
)
from ssd_client.local_mps import DRAFT_SHARE
from ssd_client.prompt import PromptFlags, read_prompt
from ssd_client.request import GenerateOptions, build_request
from ssd_client.result import GenerationResult, Timing
from ssd_client.speculation import MODES, VERIFICATIONS

INTERRUPTED = 130

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Flags = TypeVar("_Flags", PromptFlags, GenerateOptions, LocalFlags)


class _Program(click.Group):
    """Ends every failure with one line on stderr and the exit code that it stands for."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except click.ClickException as error:
            render.show_error(BadInputError(error.format_message()))
            code = error.exit_code
        except ClientError as error:
            render.show_error(error)
            code = error.exit_code
        except click.Abort:  # click's word for Ctrl-C
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


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


def _options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Several click options as one decorator, in the order in which --help shows them."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_prompt_options = _options(
    click.argument("prompt", required=False, type=params.Utf8()),
    click.option("--prompt-file", type=click.Path(), help="Read the prompt here; - is stdin."),
    click.option("--token-ids", type=params.TokenIds(), help='Prompt as token ids: "1,2,3".'),
    click.option("--chat", is_flag=True, help="Send the prompt as a user's chat message."),
    click.option("--system", type=params.Utf8(), help="System message, with --chat."),
)

_sampling_options = _options(
    click.option("--temperature", type=params.Number(), help="0 takes the most likely token."),
    click.option("--top-k", type=params.Uint(), help="Keep the k most likely tokens; 0: all."),
    click.option(
        "--top-p", type=params.Number(), help="Keep tokens up to this share of probability."
    ),
    click.option(
        "--min-p", type=params.Number(), help="Drop tokens below this share of the likeliest."
    ),
    click.option("--repetition-penalty", type=params.Number(), help="Above 1: repeat less."),
    click.option(
        "--presence-penalty", type=params.Number(), help="Taken once from tokens in the output."
    ),
    click.option(
        "--frequency-penalty",
        type=params.Number(),
        help="Taken for each time that a token is there.",
    ),
    click.option(
        "--logit-bias",
        type=params.LogitBias(),
        multiple=True,
        help="Added to its logit; repeatable.",
    ),
    click.option("--seed", type=params.Uint(64), help="Same seed, same text. Drawn if not given."),
)

_stop_options = _options(
    click.option("--max-tokens", type=params.Uint(), help="Output tokens at most."),
    click.option(
        "--stop", type=params.Lines(), multiple=True, help="End the text before this; repeatable."
    ),
    click.option(
        "--stop-token-id",
        type=params.Uint(),
        multiple=True,
        help="End with this token; repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end of the sequence."),
)

_speculation_options = _options(
    click.option(
        "--mode",
        type=click.Choice(list(MODES)),
        help="ssd: drafts prepare while the target verifies; sync: draft and target take turns; "
        "off: plain decoding.",
    ),
    click.option(
        "--draft",
        type=params.Address(),
        multiple=True,
        help="Speculation endpoint to use, among those that the target allows; repeatable.",
    ),
    click.option("--depth", type=params.Uint(least=1), help="Tokens of a speculation at most."),
    click.option(
        "--verification",
        type=click.Choice(list(VERIFICATIONS)),
        help="coupled: the text of plain decoding; rejection: the target's distribution.",
    ),
    click.option(
        "--down-weight",
        type=params.Number(),
        help="Rejection: weight, 0 to 1, of the tokens that the draft prepares for.",
    ),
)

_output_options = _options(
    click.option("--logprobs", is_flag=True, help="Log probability of each token (--json)."),
    click.option(
        "--top-logprobs",
        type=params.Uint(least=1),
        help="And of the N most likely in its place (--json).",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, do not stream."),
)

_serving_options = _options(
    click.option(
        "--target",
        type=params.Address(),
        multiple=True,
        help="Where to send the request; repeat it to name where it goes on when one is lost.  "
        f"[default: {DEFAULT_ADDRESS}]",
    ),
    click.option(
        "--retries",
        type=params.Uint(),
        help="How often, in all, the request is sent again after an endpoint was lost; it goes on "
        "after the tokens received.  [default: one less than there are targets]",
    ),
    click.option(
        "--timeout", type=params.Seconds(), help="For the whole request, resumes included."
    ),
    click.option("--request-id", type=params.Utf8(), help="Shown in the server's log."),
    click.option(
        "--local", is_flag=True, help="Start a target and a draft here, stop them afterwards."
    ),
    click.option(
        "--local-model",
        type=params.Utf8(),
        help=f"Model of --local: a shipped name or a folder.  [default: {DEFAULT_MODEL}]",
    ),
    click.option(
        "--local-draft",
        type=params.Utf8(),
        help=f"Draft model of --local; {NO_DRAFT} starts no draft.  "
        f"[default: {DEFAULT_DRAFTS[DEFAULT_MODEL]} for {DEFAULT_MODEL}, else {NO_DRAFT}]",
    ),
    click.option(
        "--local-device",
        type=click.Choice(DEVICES),
        help="Where target and draft of --local run.  [default: auto]",
    ),
    click.option(
        "--local-draft-device",
        type=click.Choice(DEVICES),
        help="Where the draft of --local runs; cpu needs no part of a GPU.  "
        "[default: --local-device]",
    ),
    click.option(
        "--local-mps",
        is_flag=True,
        help="Target and draft of --local use one GPU at the same time, not in turns: starts "
        "NVIDIA's MPS daemon, or uses that of CUDA_MPS_PIPE_DIRECTORY.",
    ),
    click.option(
        "--local-draft-share",
        type=params.Percent(),
        help="Percent of the GPU's multiprocessors that the draft may take under --local-mps; the "
        f"target may take the rest. 100: both may use all of them.  [default: {DRAFT_SHARE}]",
    ),
)


@cli.command()
@_prompt_options
@_sampling_options
@_stop_options
@_speculation_options
@_output_options
@_serving_options
def generate(**flags: Any) -> None:
    """Continues PROMPT and streams the text to stdout.

    Without PROMPT, --prompt-file and --token-ids the prompt is read from stdin, exactly as it is.
    Options that are not given are left to the server. Statistics go to stderr.

    Exit codes: 0 finished, 1 failed, 2 bad input, 130 interrupted.
    """
    _check_generate(flags)
    plan = plan_local(_pick(LocalFlags, flags)) if flags["local"] else None
    request = build_request(read_prompt(_pick(PromptFlags, flags)), _pick(GenerateOptions, flags))
    notes = Console(stderr=True)
    output = _output(notes, flags)
    with _serving(notes, flags["target"], plan) as endpoints:
        events = stream.generate(
            endpoints,
            request,
            timeout_s=flags["timeout"],
            policy=RetryPolicy(retries=flags["retries"]),
        )
        with contextlib.closing(events):
            _show(events, output)


@cli.command()
@click.option("--target", type=params.Address(), default=DEFAULT_ADDRESS, show_default=True)
@click.option("--timeout", type=params.Seconds(), default=10.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(target: str, timeout: float, as_json: bool) -> None:
    """Shows what a target serves and within which bounds."""
    with connect([target]) as (endpoint,):
        answer = endpoint.model_info(timeout)
    rows = render.model_info_json(answer)
    if as_json:
        render.write_json(rows)
    else:
        render.show_model_info(rows)


def _show(events: Iterator[Any], output: render.Output) -> None:
    """Follows a generation to its end, and shows what arrived whatever ends it."""
    result = GenerationResult(Timing(sent=time.monotonic()))
    try:
        for event in events:
            result.add(event, time.monotonic())
            output.show(event)
    except (KeyboardInterrupt, SystemExit):
        result.end(time.monotonic())
        output.end(result, "interrupted")
        raise
    except ClientError:
        result.end(time.monotonic())
        output.end(result, "failed")
        raise
    output.end(result, None)


def _check_generate(flags: dict[str, Any]) -> None:
    if flags["local"] and flags["target"]:
        raise BadInputError("--local starts a target of its own: leave --target out")
    for name, value in flags.items():
        if name.startswith("local_") and value not in (None, False) and not flags["local"]:
            raise BadInputError(f"--{name.replace('_', '-')} needs --local")
    if (flags["logprobs"] or flags["top_logprobs"]) and not flags["as_json"]:
        raise BadInputError("log probabilities are part of the JSON output: add --json")
    pairs = flags["logit_bias"]
    flags["logit_bias"] = dict(pairs)
    if len(flags["logit_bias"]) != len(pairs):
        raise BadInputError("--logit-bias: the same token twice")


def _pick(kind: type[_Flags], flags: dict[str, Any]) -> _Flags:
    return kind(**{each.name: flags[each.name] for each in dataclasses.fields(kind)})


def _output(notes: Console, flags: dict[str, Any]) -> render.Output:
    if flags["as_json"]:
        logprobs = flags["logprobs"] or flags["top_logprobs"] is not None
        return render.JsonOutput(notes, logprobs=logprobs)
    return render.TextOutput(notes)


@contextlib.contextmanager
def _serving(
    notes: Console, targets: Sequence[str], plan: LocalPlan | None
) -> Iterator[list[Endpoint]]:
    """The endpoints of the command, a target started for it included."""
    with contextlib.ExitStack() as stack:
        addresses = targets or (DEFAULT_ADDRESS,)
        if plan is not None:
            addresses = (_start_local(stack, notes, plan),)
        yield stack.enter_context(connect(addresses))


def _start_local(stack: contextlib.ExitStack, notes: Console, plan: LocalPlan) -> str:
    title = f"{plan.model} with {plan.draft}" if plan.draft else plan.model
    with render.startup_status(notes, title) as on_phase:
        target = stack.enter_context(
            LocalTarget(
                plan.model,
                draft=plan.draft,
                flags=plan.target_flags,
                draft_flags=plan.draft_flags,
                mps=plan.mps,
                draft_share=plan.draft_share,
                on_phase=on_phase,
            )
        )
    render.note(notes, f"{title} ready after {target.startup_s:.1f} s")
    return target.address


def main() -> None:
    cli.main(prog_name="ssd-client")


if __name__ == "__main__":
    main()
