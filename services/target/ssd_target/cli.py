"""``ssd-target``: the command line, a thin edge over TargetConfig."""

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import click

from ssd_engine.errors import ConfigError, ModelError, SSDError
from ssd_engine.log import setup_logging
from ssd_engine.runner_options import DTYPE_NAMES
from ssd_target import __version__
from ssd_target.config import DEVICES, LOG_LEVELS, TargetConfig

DEFAULTS = {f.name: f.default for f in dataclasses.fields(TargetConfig)}
NEEDS_SERVE = 'ssd-target needs the serving extra: pip install "ssd-serve[serve]"'
EXIT_BAD_INPUT, EXIT_FAILED = 2, 1

log = logging.getLogger(__name__)


def option(flag: str, help_text: str, **kwargs: Any) -> Any:
    """An option whose default is TargetConfig's, with its environment variable."""
    name = flag.removeprefix("--").split("/")[0].replace("-", "_")
    default = DEFAULTS[name]
    return click.option(
        flag,
        default=default,
        show_default=default is not None,
        envvar=f"SSD_TARGET_{name.upper()}",
        help=help_text,
        **kwargs,
    )


@click.group()
@click.version_option(__version__, prog_name="ssd-target")
def main() -> None:
    """Serve a target model. Every option has an environment variable: --tp is SSD_TARGET_TP."""


@main.command()
@click.argument("model", envvar="SSD_TARGET_MODEL")
@option("--listen", "HOST:PORT of the gRPC service; port 0 takes a free one.")
@option("--port-file", "Write the port here once the service listens.", type=Path)
@option("--name", "Name under which the model is served.")
@option("--tp", "Tensor-parallel ranks.", type=int)
@option("--device", "Where to run.", type=click.Choice(DEVICES))
@option("--dtype", "auto: float32 on CPU.", type=click.Choice(("auto", *DTYPE_NAMES)))
@option("--max-model-len", "Context: prompt and output together. Default: the model's.", type=int)
@option("--allow-long-context", "Allow a context beyond the model's, for timing.", is_flag=True)
@option("--max-num-seqs", "Sequences that run at a time.", type=int)
@option("--max-waiting", "Requests that may wait; one more is refused.", type=int)
@option("--prefill-chunk", "Prompt tokens per prefill forward.", type=int)
@option("--block-size", "Tokens per KV block.", type=int)
@option("--num-kv-blocks", "KV blocks. Default: sized from memory.", type=int)
@option("--gpu-memory-utilization", "Share of a GPU's memory to use.", type=float)
@option("--threads", "CPU threads per rank. Default: all cores but one.", type=int)
@option("--drain-timeout", "Seconds that running requests get after SIGTERM.", type=float)
@option("--write-timeout", "Seconds after which a client that reads nothing is left.", type=float)
@option("--max-message-mib", "Largest gRPC message, in MiB.", type=int)
@option("--keepalive-seconds", "Interval of HTTP/2 pings to clients.", type=float)
@option("--reflection", "Offer gRPC reflection.", is_flag=True)
@option("--metrics-listen", "HOST:PORT of Prometheus metrics. Default: none.")
@option("--log-level", "How much to log.", type=click.Choice(LOG_LEVELS))
@option("--check-integrity", "Debug: check the engine's books after every step.", is_flag=True)
@click.option(
    "--check-config",
    is_flag=True,
    envvar="SSD_TARGET_CHECK_CONFIG",
    help="Validate the options and the model, and exit.",
)
def serve(check_config: bool, **options: Any) -> None:
    """Serve MODEL: a Hugging Face directory, the name of a shipped model, or a hub id."""
    setup_logging("target", options["log_level"])
    try:
        _serve(TargetConfig(**options), check_config)
    except (ConfigError, ModelError) as error:
        _exit(EXIT_BAD_INPUT, error)
    except SSDError as error:
        _exit(EXIT_FAILED, error)


def _serve(config: TargetConfig, check_only: bool) -> None:
    try:
        from ssd_target.server import TargetServer, plan_target
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ssd"):
            raise
        raise ConfigError(NEEDS_SERVE) from None

    plan = plan_target(config)
    if check_only:
        from ssd_engine.tokenizer import Tokenizer

        Tokenizer(plan.runner.directory, plan.model)
        click.echo(f"ok: {plan.name}, {plan.checkpoint.num_parameters / 1e6:.1f}M parameters")
        return

    async def run() -> None:
        await TargetServer(plan).run()

    asyncio.run(run())


def _exit(code: int, error: Exception) -> None:
    click.echo(f"error: {error}", err=True)
    raise SystemExit(code)
