"""Options that several commands share, each group as one decorator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ssd_client.connection.endpoints import DEFAULT_ADDRESS
from ssd_client.connection.failover import DEFAULT_STALL_S
from ssd_client.errors import BadInputError
from ssd_client.generate.speculation import MODES, VERIFICATIONS
from ssd_client.local.launcher import DEFAULT_DRAFTS, DEFAULT_MODEL, DEVICES, NO_DRAFT
from ssd_client.local.mps import DRAFT_SHARE
from ssd_client.terminal import params

_Command = TypeVar("_Command", bound=Callable[..., Any])
OWN, LOCAL = "Options", "Services that are started here"


def _bias_by_token(
    context: click.Context, param: click.Parameter, pairs: Sequence[tuple[int, float]]
) -> dict[int, float]:
    """The values of --logit-bias; raises BadInputError where a token is given twice."""
    if len(dict(pairs)) != len(pairs):
        raise BadInputError("--logit-bias: the same token twice")
    return dict(pairs)


class SectionedCommand(click.Command):
    """A command whose --help shows its own options first, and shared ones in their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {OWN: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", OWN), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def options(group: str, *options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Several click options as one decorator, in the order in which --help shows them, under the
    heading ``group``."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
            command.__click_params__[-1].group = group  # type: ignore[attr-defined]
        return command

    return decorate


prompt_options = options(
    "Prompt",
    click.argument("prompt", required=False, type=params.UTF8),
    click.option("--prompt-file", type=click.Path(), help="Read the prompt here; - is stdin."),
    click.option("--token-ids", type=params.TOKEN_IDS, help='Prompt as token ids: "1,2,3".'),
    click.option("--chat", is_flag=True, help="Send the prompt as a user's chat message."),
    click.option("--system", type=params.UTF8, help="System message, with --chat."),
)

chat_options = options(
    "Prompt",
    click.option(
        "--chat-template-kwargs",
        type=params.JSON_OBJECT,
        help="Names for the chat template: '{\"enable_thinking\": false}'.",
    ),
)

sampling_options = options(
    "Sampling",
    click.option("--temperature", type=params.NUMBER, help="0 takes the most likely token."),
    click.option("--top-k", type=params.uint(), help="Keep the k most likely tokens; 0: all."),
    click.option(
        "--top-p", type=params.NUMBER, help="Keep tokens up to this share of probability."
    ),
    click.option(
        "--min-p", type=params.NUMBER, help="Drop tokens below this share of the likeliest."
    ),
    click.option("--repetition-penalty", type=params.NUMBER, help="Above 1: repeat less."),
    click.option(
        "--presence-penalty", type=params.NUMBER, help="Taken once from tokens in the output."
    ),
    click.option(
        "--frequency-penalty",
        type=params.NUMBER,
        help="Taken for each time that a token is there.",
    ),
    click.option(
        "--logit-bias",
        type=params.LOGIT_BIAS,
        multiple=True,
        callback=_bias_by_token,
        help="Added to its logit; repeatable.",
    ),
    click.option("--seed", type=params.uint(64), help="Same seed, same text. Drawn if not given."),
)

stop_options = options(
    "Length and end",
    click.option("--max-tokens", type=params.uint(), help="Output tokens at most."),
    click.option("--min-tokens", type=params.uint(), help="No stop and no end before so many."),
    click.option(
        "--stop",
        type=params.UTF8_LINES,
        multiple=True,
        help="End the text before this; repeatable.",
    ),
    click.option(
        "--stop-token-id",
        type=params.uint(),
        multiple=True,
        help="End with this token; repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end of the sequence."),
)

grammar_options = options(
    "What the text must be",
    click.option(
        "--json-schema", type=params.TEXT_FILE, help="A JSON value that this schema describes."
    ),
    click.option("--regex", type=params.UTF8, help="What a regular expression matches."),
    click.option(
        "--choice", type=params.UTF8_LINES, multiple=True, help="One of some texts; repeatable."
    ),
    click.option(
        "--grammar",
        type=params.TEXT_FILE,
        help="What a context-free grammar describes: Lark, GBNF.",
    ),
)

speculation_options = options(
    "Speculation",
    click.option(
        "--mode",
        type=click.Choice(list(MODES)),
        help="ssd: drafts prepare while the target verifies; sync: draft and target take turns; "
        "off: plain decoding. Where none is named, the target takes its own, which may be the one "
        "that measures fastest.",
    ),
    click.option(
        "--draft",
        type=params.ADDRESS,
        multiple=True,
        help="Speculation endpoint to use, among those that the target allows; repeatable.",
    ),
    click.option("--depth", type=params.uint(least=1), help="Tokens of a speculation at most."),
    click.option(
        "--verification",
        type=click.Choice(list(VERIFICATIONS)),
        help="coupled: the text of plain decoding; rejection: the target's distribution.",
    ),
    click.option(
        "--down-weight",
        type=params.NUMBER,
        help="Rejection: weight, 0 to 1, of the tokens that the draft prepares for.",
    ),
)

output_options = options(
    "Output",
    click.option("--logprobs", is_flag=True, help="Log probability of each token (--json)."),
    click.option(
        "--top-logprobs",
        type=params.uint(least=1),
        help="And of the N most likely in its place (--json).",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, do not stream."),
)

serving_options = options(
    "Server",
    click.option(
        "--target",
        type=params.TARGET,
        multiple=True,
        help="Where to send the request; repeat it to name where it goes on when one is lost. "
        "dns:///NAME:PORT names all addresses behind a name, in random order.  "
        f"[default: {DEFAULT_ADDRESS}]",
    ),
    click.option(
        "--retries",
        type=params.uint(),
        help="How often, in all, the request is sent again after an endpoint was lost; it goes on "
        "after the tokens received.  [default: one less than there are targets]",
    ),
    click.option("--timeout", type=params.SECONDS, help="For the whole request, resumes included."),
    click.option(
        "--stall-timeout",
        type=params.SECONDS,
        help="The request goes on at another target where one has sent neither a token nor a sign "
        f"of life for so long.  [default: {DEFAULT_STALL_S:g}]",
    ),
    click.option("--request-id", type=params.UTF8, help="Shown in the server's log."),
    click.option(
        "--cache-salt",
        type=params.UTF8,
        help="What is cached of the prompt is found by requests with the same one alone.",
    ),
)

url_option = options(
    "Server",
    click.option(
        "--url",
        type=params.URL,
        help="A gateway, http://HOST:PORT, in place of targets.",
    ),
)

local_service_options = options(
    LOCAL,
    click.option(
        "--local-model",
        type=params.UTF8,
        help=f"Model of --local: a shipped name or a folder.  [default: {DEFAULT_MODEL}]",
    ),
    click.option(
        "--local-draft",
        type=params.UTF8,
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
        type=params.PERCENT,
        help="Percent of the GPU's multiprocessors that the draft may take under --local-mps; the "
        "target may take the rest. 100: both may use all of them. Where it is not given, share and "
        "--depth are what fits the sizes of the two models, and a draft for which there is no room "
        f"drafts inside the target.  [default: by size, {DRAFT_SHARE} where that is not known]",
    ),
)

local_options = options(
    LOCAL,
    click.option(
        "--local", is_flag=True, help="Start a target and a draft here, stop them afterwards."
    ),
    local_service_options,
)
