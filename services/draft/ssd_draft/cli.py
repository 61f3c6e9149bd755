"""``ssd-draft``: the command line, a thin edge over DraftConfig."""

from functools import partial
from typing import Any

import click

from ssd_draft import __version__
from ssd_draft.config import DraftConfig
from ssd_draft.speculators.registry import KINDS, kind_of
from ssd_engine.process.fork_server import ForkServer, fork_server_here
from ssd_serving.command_line import (
    CONTEXT,
    VERSION,
    GroupedCommand,
    OptionFactory,
    running_command,
    serving_extra,
)

ENGINE = "ssd_draft.engine.engine_process"
option = OptionFactory(DraftConfig, "SSD_DRAFT")


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ssd-draft", message=VERSION)
def main() -> None:
    """Serve speculations. Every option has an environment variable: --tp is SSD_DRAFT_TP."""


@main.command(cls=GroupedCommand, context_settings=CONTEXT)
@click.argument("model", required=False, envvar=option.variable("model"))
@option(
    "--speculator",
    "A draft model; an EAGLE-3 head, which drafts from its target's hidden states; or look-up in "
    "prompt and output, which needs no MODEL. Default: what MODEL is.",
    type=click.Choice(list(KINDS)),
)
@option(
    "--target-model",
    "Of a head: its target's directory, for embedding and tokenizer, which most heads lack.",
    metavar="MODEL",
)
@option(
    "--aux-layers",
    "Of a head: the hidden states that it reads, in place of those that its config names. N is "
    "what layer N gets, counted from 0: 0 the embeddings, as many as there are layers the last "
    "one's output.",
    metavar="N,N,N",
)
@option(
    "--feature-window",
    "Of a head: the last positions of a sequence whose hidden states are kept for it.",
    type=int,
)
@option.model()
@option(
    "--max-links",
    "Targets at a time; one more is refused, unless somebody has two more than the newcomer.",
    type=int,
)
@option("--max-seqs-per-link", "Sequences of one target. Default: --max-num-seqs.", type=int)
@option("--depth", "Tokens of the longest branch.", type=int)
@option("--budget", "Branches of a round at most.", type=int)
@option(
    "--fan-out",
    "Outcomes to prepare for after 0, 1, … accepted tokens of a speculation from the cache: "
    "a list such as 3,2,1, whose last number goes on; auto follows measured rates.",
)
@option("--fan-out-miss", "The same after any other speculation.")
@option("--max-rows", "Rows of a forward, of all sequences together.", type=int)
@option(
    "--plane-ports",
    "Ports for tensor planes to listen on, such as 7500-7599, where a firewall asks for it. "
    "NCCL, which takes any port, is not used then. Default: any free port.",
    metavar="LOW-HIGH",
)
@option("--max-frames", "Frames of a link that may wait for the engine.", type=int)
@option(
    "--link-write-timeout", "Seconds after which a target that reads nothing is left.", type=float
)
@option(
    "--max-links-per-identity",
    "Targets of one identity: a token, a certificate, else a host. Default: --max-links.",
    type=int,
)
@option.security()
@option.operation(drained="linked targets")
def serve(check_config: bool, **options: Any) -> None:
    """Serve speculations of MODEL: a Hugging Face directory, a shipped model, or a hub id."""
    forks = None if check_config else fork_server_here([ENGINE])
    with running_command("draft", options):
        _serve(DraftConfig(**options), check_config, forks)


def _serve(config: DraftConfig, check_only: bool, forks: ForkServer | None) -> None:
    with serving_extra("ssd-draft"):
        from ssd_draft.front.server import DraftServer, plan_draft
        from ssd_serving.server import check_or_serve

    plan = plan_draft(config)
    tokenizer = None if plan is None else plan.load_tokenizer()
    make_server = partial(DraftServer, config, plan, tokenizer, forks)
    check_or_serve(check_only, config, plan, plan or kind_of(config), make_server)
