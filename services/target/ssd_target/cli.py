"""``ssd-target``: the command line, a thin edge over TargetConfig."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from ssd_engine.parallel.ranks.rank_start import RANK_MODULE
from ssd_engine.process.fork_server import ForkServer, fork_server_here
from ssd_engine.process.log import FORMATS
from ssd_serving.command_line import (
    CONTEXT,
    VERSION,
    GroupedCommand,
    OptionFactory,
    running_command,
    serving_extra,
)
from ssd_serving.config import DEVICES, LOG_LEVELS
from ssd_target import __version__
from ssd_target.config import BACKUPS, GENERATION_CONFIGS, MODES, JoinConfig, TargetConfig

ENGINE = "ssd_target.engine.engine_process"
option = OptionFactory(TargetConfig, "SSD_TARGET")
join_option = OptionFactory(JoinConfig, "SSD_TARGET")


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ssd-target", message=VERSION)
def main() -> None:
    """Serve a target model. Every option has an environment variable: --tp is SSD_TARGET_TP."""


@main.command(cls=GroupedCommand, context_settings=CONTEXT)
@click.argument("model", envvar=option.variable("model"))
@option.model()
@option(
    "--generation-config",
    "Sampling options that requests do not name: those of the model's generation_config.json, or "
    "neutral ones (temperature 1, nothing filtered).",
    type=click.Choice(GENERATION_CONFIGS),
)
@option("--chat-template", "Jinja file in place of the model's chat template.", type=Path)
@option(
    "--allow-control-tokens/--no-allow-control-tokens",
    "Messages of a chat may contain control tokens, such as those that end a turn. Without, what "
    "spells one in a message is text. Prompts that are no chats may always contain them.",
)
@option(
    "--swap-gib",
    "Memory of the host for the KV of sequences that are set aside when blocks run out, where "
    "copying is quicker than computing it again.",
    type=float,
)
@option(
    "--share-prefixes/--no-share-prefixes",
    "Identities find what is cached of each other's prompts. It saves computing, and whoever "
    "measures it can tell what others have asked.",
)
@option("--max-waiting", "Requests that may wait; one more is refused.", type=int)
@option("--write-timeout", "Seconds after which a client that reads nothing is left.", type=float)
@option(
    "--max-backlog-kib",
    "Memory for tokens and logprobs that wait for a slow client; beyond, it is left.",
    type=int,
)
@option(
    "--mode",
    "How requests are sped up that name no mode. auto: by the mode that measures fastest here at "
    "the time, among those that --draft and --draft-model make possible.",
    type=click.Choice(MODES),
)
@option(
    "--draft",
    "Speculation endpoint, HOST:PORT; all behind a name, dns:///NAME:PORT; or all that a file "
    "lists, file:///PATH, one HOST:PORT to a line. Repeatable.",
    multiple=True,
)
@option(
    "--discover-seconds",
    "How often names and files of --draft are looked up again; sooner when a link fails.",
    type=float,
)
@option(
    "--allow-draft",
    "Pattern of endpoints that requests may name, such as 10.0.*:7420; repeatable.",
    multiple=True,
)
@option(
    "--trust-draft",
    "Pattern of endpoints that may be used for rejection verification; repeatable.",
    multiple=True,
)
@option("--draft-model", "Draft model inside this process, for mode sync.", metavar="MODEL")
@option(
    "--aux-layers",
    "Where --draft-model is an EAGLE-3 head: the hidden states that it reads, in place of those "
    "that its config names. N is what layer N gets, counted from 0: 0 the embeddings, as many as "
    "there are layers the last one's output.",
    metavar="N,N,N",
)
@option("--draft-expand-to", "Grow the draft model, for timing.", metavar="SHAPE")
@option("--depth", "Longest speculation, in tokens.", type=int)
@option(
    "--adapt-depth/--no-adapt-depth",
    "Speculate less where measured acceptance and times say so.",
)
@option("--wait", "For a missing branch: auto, or milliseconds at most.", metavar="auto|MS")
@option("--backup", "What a row does that missed.", type=click.Choice(tuple(BACKUPS)))
@option(
    "--auto-off/--no-auto-off",
    "Leave a way to speculate that does not pay, and try it later: an endpoint for --draft-model "
    "where that is faster, and either for plain decoding. Without, a mode is kept whatever it is "
    "worth; --mode auto is ssd with --draft, else sync with --draft-model, else off.",
)
@option("--link-timeout", "Seconds after which a silent endpoint is given up.", type=float)
@option(
    "--feature-window",
    "Tokens of a sequence, the last ones, whose hidden states are kept in the host's memory while "
    "an endpoint serves a head, which reads them: for one that comes later, or comes back.",
    type=int,
)
@option(
    "--keep-features",
    "The host's memory, in MiB, for the hidden states of what the prefix cache holds: a head is "
    "told them again when a prompt is found there.",
    type=int,
)
@option(
    "--synthetic-acceptance",
    "For load tests without a good draft: speculated tokens are right with this probability, "
    "0.01 to 1, whatever the model says. Texts are then nobody's, and marked as such.",
    type=float,
)
@option(
    "--draft-tls-ca",
    "Speculation endpoints are dialled over TLS, and need certificates signed by this one (PEM). "
    "They are shown --tls-cert, if they ask.",
    type=Path,
)
@option("--draft-token-file", "File with the bearer token for speculation endpoints.", type=Path)
@option(
    "--insecure-plane",
    "Let rows of a link with TLS leave this host in clear text: tensor planes have no TLS.",
    is_flag=True,
)
@option("--limit-requests", "Requests that an identity may have at a time.", type=int)
@option(
    "--limit-tokens-per-minute",
    "Tokens, of prompts and outputs, that an identity may use in a minute.",
    type=int,
)
@option("--limit-prompt-tokens", "Longest prompt of an identity, in tokens.", type=int)
@option.security()
@option("--nodes", "Nodes that share the ranks; others come with ssd-target join.", type=int)
@option("--cluster-listen", "HOST:PORT at which other nodes join; port 0 takes a free one.")
@option("--cluster-secret-file", "File with the secret that nodes prove to each other.", type=Path)
@option("--join-timeout", "Seconds until all nodes must have joined.", type=float)
@option("--cluster-timeout", "Seconds of silence after which a node counts as lost.", type=float)
@option.operation(drained="running requests")
def serve(check_config: bool, **options: Any) -> None:
    """Serve MODEL: a Hugging Face directory, the name of a shipped model, or a hub id."""
    forks = None if check_config else fork_server_here([ENGINE])
    with running_command("target", options):
        _serve(TargetConfig(**options), check_config, forks)


@main.command(cls=GroupedCommand, context_settings=CONTEXT)
@join_option("--leader", "HOST:PORT of the leader's --cluster-listen; a name may be one of DNS.")
@join_option("--node", "This node's number, from 1 on; the leader is 0.", type=int)
@join_option("--cluster-secret-file", "File with the leader's secret.", type=Path)
@join_option("--model", "The model's place here. Default: as it was named at the leader.")
@join_option("--device", "auto: as the leader.", type=click.Choice(DEVICES))
@join_option("--devices", "GPUs of this node's ranks, such as 0,1.", metavar="N,N")
@join_option("--threads", "CPU threads per rank. Default: as the leader.", type=int)
@join_option("--kernel-cache", "As that of serve.", type=Path)
@join_option("--join-timeout", "Seconds to look for the leader.", type=float)
@join_option("--health-listen", "HOST:PORT of gRPC health, for probes. Default: none.")
@join_option("--log-level", "Default: as the leader.", type=click.Choice(LOG_LEVELS))
@join_option("--log-format", "Lines of text, or JSON objects.", type=click.Choice(FORMATS))
@join_option.check_config()
def join(check_config: bool, **options: Any) -> None:
    """Join a leader, ssd-target serve --nodes, and compute with it for as long as it serves."""
    forks = None if check_config else fork_server_here([RANK_MODULE])
    with running_command(f"target/node{options['node']}", options):
        with serving_extra("ssd-target"):
            from ssd_target.node import check_join, run_join

        config = JoinConfig(**options)
        checked = check_join(config)
        if check_config:
            click.echo(f"ok: node {config.node} of {config.leader}")
            return
        run_join(config, checked, forks or ForkServer([RANK_MODULE]))


def _serve(config: TargetConfig, check_only: bool, forks: ForkServer | None) -> None:
    with serving_extra("ssd-target"):
        from ssd_serving.server import check_or_serve
        from ssd_target.front.server import TargetServer, plan_target

    plan = plan_target(config)
    tokenizer = plan.load_tokenizer()  # before anything is started that it could stop
    make_server = partial(TargetServer, config, plan, tokenizer, forks)
    check_or_serve(check_only, config, plan.target, plan, make_server)
