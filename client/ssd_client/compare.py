"""`ssd-client compare`: the same prompts and seeds on two sides, token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from ssd_client.bench.measure.equality import first_difference, token_at
from ssd_client.bench.measure.openai import OpenAIServer, check_baseline
from ssd_client.bench.measure.prompts import STORIES, load_prompts
from ssd_client.connection.endpoints import DEFAULT_ADDRESS, Endpoint, connect_one
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.api import Client
from ssd_client.generate.events import TokenLogprobs
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult
from ssd_client.generate.speculation import MODES
from ssd_client.terminal import params, render
from ssd_client.terminal.options import SectionedCommand
from ssd_client.terminal.render import write_stdout
from ssd_client.terminal.security_options import security_options

DIFFERENT = 1
_TOP = 20  # tokens among which the other side's is looked for


@dataclass(frozen=True)
class Side:
    """An endpoint, and the mode that it is asked for; None is the server's own mode."""

    endpoint: Endpoint
    mode: str | None

    @property
    def name(self) -> str:
        return f"{self.endpoint.address} {self.mode or 'as it is'}"


@dataclass(frozen=True)
class FirstDifference:
    """Where two texts differ first."""

    prompt: int
    position: int  # index of the token, or of the character where there are no tokens
    first: str
    second: str
    # How much more likely each side finds its own token than the other's, in logits; None where
    # the other's is not among its likeliest, or a text has ended.
    first_gap: float | None = None
    second_gap: float | None = None


@click.command(cls=SectionedCommand)
@click.option(
    "--target",
    "targets",
    type=params.TARGET,
    multiple=True,
    help="One for two modes, or two.  [default: 127.0.0.1:7410]",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(list(MODES)),
    multiple=True,
    help="One for both targets, or two.  [default: off and ssd on one target]",
)
@click.option(
    "--baseline",
    type=params.Parsed(check_baseline, "openai:url"),
    help="The second side is another server: texts are compared, not tokens.",
)
@click.option("--data", type=params.UTF8, default=STORIES, show_default=True, help="As for bench.")
@click.option("--num-prompts", type=params.uint(least=1), default=8, show_default=True)
@click.option("--max-tokens", type=params.uint(least=1), default=64, show_default=True)
@click.option("--temperature", type=params.NUMBER, default=0.0, show_default=True)
@click.option("--seed", type=params.uint(32), default=0, show_default=True)
@click.option("--chat/--no-chat", default=True, help="Prompts as a user's message, or as they are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@security_options
def compare(**flags: Any) -> None:
    """Says where two endpoints or modes first give another token, and by how much.

    Exit codes: 0 all equal, 1 a difference or a failure, 2 bad input.
    """
    prompts = load_prompts(flags["data"], flags["num_prompts"], flags["seed"]).prompts
    with contextlib.ExitStack() as stack:
        named = flags["targets"] or (DEFAULT_ADDRESS,)
        security = flags["security"]
        endpoints = [stack.enter_context(connect_one(each, security)) for each in named]
        sides = _sides(endpoints, flags["modes"], flags["baseline"])
        names = [side.name for side in sides]
        if flags["baseline"]:
            names.append(flags["baseline"])
            partings = _against_baseline(sides[0], flags, prompts)
        else:
            partings = [
                parting
                for number, prompt in enumerate(prompts)
                if (parting := _part(sides, flags, number, prompt)) is not None
            ]
    _show(flags["as_json"], names, len(prompts), partings)
    if partings:
        raise SystemExit(DIFFERENT)


def _sides(endpoints: Sequence[Endpoint], modes: Sequence[str], baseline: str | None) -> list[Side]:
    if len(endpoints) > 2 or len(modes) > 2:
        raise BadInputError("compare has two sides: at most two --target and two --mode")
    if baseline is not None:
        if len(endpoints) > 1 or len(modes) > 1:
            raise BadInputError("--baseline is the second side: one --target, one --mode")
        return [Side(endpoints[0], modes[0] if modes else None)]
    if len(endpoints) == 2:
        each: Sequence[str | None] = [*modes, *modes][:2] if modes else [None, None]
        return [Side(endpoint, mode) for endpoint, mode in zip(endpoints, each, strict=True)]
    if len(modes) == 1:
        raise BadInputError("--mode: one target is compared in two modes, or name two targets")
    first, second = modes or ("off", "ssd")
    return [Side(endpoints[0], first), Side(endpoints[0], second)]


def _part(
    sides: Sequence[Side], flags: dict[str, Any], number: int, prompt: str
) -> FirstDifference | None:
    first, second = (_generate(side, flags, number, prompt) for side in sides)
    position = first_difference(first.token_ids, second.token_ids)
    if position is None:
        return None
    one, other = token_at(first.token_ids, position), token_at(second.token_ids, position)
    return FirstDifference(
        number,
        position,
        _token_text(one),
        _token_text(other),
        _gap(first.logprobs, position, other),
        _gap(second.logprobs, position, one),
    )


def _generate(side: Side, flags: dict[str, Any], number: int, prompt: str) -> GenerationResult:
    client = Client.over([side.endpoint])
    ask = client.chat if flags["chat"] else client.generate
    options: RequestOptions = {
        "temperature": flags["temperature"],
        "seed": flags["seed"] + number,
        "max_tokens": flags["max_tokens"],
        "logprobs": True,
        "top_logprobs": _TOP,
    }
    if side.mode is not None:
        options["mode"] = side.mode
    return ask(prompt, **options)


def _gap(logprobs: Sequence[TokenLogprobs], position: int, other: int | None) -> float | None:
    """The gap of a side's own token to the other's: logits and log probabilities differ alike."""
    if other is None or position >= len(logprobs):
        return None
    here = logprobs[position]
    return next((here.chosen - logprob for token, logprob in here.top if token == other), None)


def _token_text(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


def _against_baseline(
    side: Side, flags: dict[str, Any], prompts: Sequence[str]
) -> list[FirstDifference]:
    server = OpenAIServer(flags["baseline"])
    partings = []
    for number, prompt in enumerate(prompts):
        mine = _generate(side, flags, number, prompt).text
        said = (
            {"messages": [{"role": "user", "content": prompt}]}
            if flags["chat"]
            else {"prompt": prompt}
        )
        content: dict[str, Any] = {
            **said,
            "max_tokens": flags["max_tokens"],
            "temperature": flags["temperature"],
            "seed": flags["seed"] + number,
        }
        measured = server.measure(number, content)
        if measured.error is not None:
            raise ClientError(measured.error)
        position = first_difference([*map(ord, mine)], [*map(ord, measured.text)])
        if position is not None:
            end = position + 12
            first, second = repr(mine[position:end]), repr(measured.text[position:end])
            partings.append(FirstDifference(number, position, first, second))
    return partings


def _show(
    as_json: bool, names: Sequence[str], count: int, partings: Sequence[FirstDifference]
) -> None:
    if as_json:
        render.write_json(
            {
                "sides": list(names),
                "prompts": count,
                "equal": count - len(partings),
                "differences": [asdict(parting) for parting in partings],
            }
        )
        return
    for parting in partings:
        gaps = [_gap_text(gap) for gap in (parting.first_gap, parting.second_gap)]
        write_stdout(
            f"prompt {parting.prompt} differs at {parting.position}: {parting.first} "
            f"({gaps[0]}), {parting.second} ({gaps[1]})\n"
        )
    write_stdout(f"{count - len(partings)} of {count} equal: {' and '.join(names)}\n")


def _gap_text(gap: float | None) -> str:
    return "no gap known" if gap is None else f"gap {gap:.2e}"
