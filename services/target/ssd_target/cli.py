"""``ssd-target``: the command line, a thin edge over TargetConfig."""

import asyncio
from typing import Any

import click

from ssd_engine.log import setup_logging
from ssd_engine.serving.command_line import Options, exit_codes, serving_extra
from ssd_target import __version__
from ssd_target.config import BACKUPS, MODES, TargetConfig

option = Options(TargetConfig, "SSD_TARGET")


@click.group()
@click.version_option(__version__, prog_name="ssd-target")
def main() -> None:
    """Serve a target model. Every option has an environment variable: --tp is SSD_TARGET_TP."""


@main.command()
@click.argument("model", envvar=option.variable("model"))
@option.model()
@option(
    "--exact/--no-exact",
    "On a GPU: one step shape for all, so that equal requests give equal bits whatever else runs.",
)
@option("--max-waiting", "Requests that may wait; one more is refused.", type=int)
@option("--write-timeout", "Seconds after which a client that reads nothing is left.", type=float)
@option(
    "--max-backlog-kib",
    "Memory for tokens and logprobs that wait for a slow client; beyond, it is left.",
    type=int,
)
@option("--mode", "How requests are sped up that name no mode.", type=click.Choice(MODES))
@option("--draft", "HOST:PORT of a speculation endpoint; repeatable.", multiple=True)
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
@option("--draft-expand-to", "Grow the draft model, for timing.", metavar="SHAPE")
@option("--depth", "Longest speculation, in tokens.", type=int)
@option(
    "--adapt-depth/--no-adapt-depth",
    "Speculate less where measured acceptance and times say so.",
)
@option("--wait", "For a missing branch: auto, or milliseconds at most.", metavar="auto|MS")
@option("--backup", "What a row does that missed.", type=click.Choice(tuple(BACKUPS)))
@option("--auto-off/--no-auto-off", "Leave an endpoint that does not pay, and try it later.")
@option("--link-timeout", "Seconds after which a silent endpoint is given up.", type=float)
@option(
    "--synthetic-acceptance",
    "For load tests without a good draft: speculated tokens are right with this probability, "
    "0.01 to 1, whatever the model says. Texts are then nobody's, and marked as such.",
    type=float,
)
@option.operation(drained="running requests")
def serve(check_config: bool, **options: Any) -> None:
    """Serve MODEL: a Hugging Face directory, the name of a shipped model, or a hub id."""
    setup_logging("target", options["log_level"])
    with exit_codes():
        _serve(TargetConfig(**options), check_config)


def _serve(config: TargetConfig, check_only: bool) -> None:
    with serving_extra("ssd-target"):
        from ssd_target.server import TargetServer, plan_target

    plan = plan_target(config)
    if check_only:
        plan.check_tokenizers()
        click.echo(f"ok: {plan}")
        return

    async def run() -> None:
        await TargetServer(config, plan).run()

    asyncio.run(run())
