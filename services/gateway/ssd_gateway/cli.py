"""``ssd-gateway``: the command line, a thin edge over GatewayConfig."""

from pathlib import Path
from typing import Any

import click

from ssd_engine.process.log import FORMATS
from ssd_gateway import __version__
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from ssd_gateway.config import GatewayConfig, check_gateway
from ssd_serving.command_line import (
    CONTEXT,
    VERSION,
    GroupedCommand,
    OptionFactory,
    running_command,
    serving_extra,
)
from ssd_serving.config import LOG_LEVELS

option = OptionFactory(GatewayConfig, "SSD_GATEWAY")


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="ssd-gateway", message=VERSION)
def main() -> None:
    """Serve OpenAI's API. Every option has an environment variable: --listen is
    SSD_GATEWAY_LISTEN."""


@main.command(cls=GroupedCommand, context_settings=CONTEXT)
@option(
    "--target",
    "HOST:PORT of a target, or dns:///NAME:PORT for all behind a name. Several are allowed.",
    multiple=True,
)
@option("--listen", "HOST:PORT of the HTTP service; port 0 takes a free one.")
@option("--port-file", "Write the port here once the service listens.", type=Path)
@option("--page/--no-page", "Serve a page with a chat at /.")
@option(
    "--draft-traces/--no-draft-traces",
    "Ask drafts, too, for the page's timeline. They must be reachable, and let the caller in.",
)
@option("--cors-origin", "Origin whose pages may call this API. Default: none.", multiple=True)
@option(
    "--allow-unknown-fields",
    "Drop fields that are not known, instead of refusing the request.",
    is_flag=True,
)
@option(
    "--tool-parser",
    "How models write calls of tools. auto: as targets say; none: requests with tools are refused.",
    type=click.Choice(["auto", *TOOL_FORMATS, "none"]),
)
@option("--max-body-mib", "Largest body, in MiB.", type=int)
@option("--max-bodies-mib", "Bodies above 64 KiB at a time, together, in MiB.", type=int)
@option("--max-header-kib", "Largest headers, in KiB.", type=int)
@option("--max-connections", "Connections at a time.", type=int)
@option("--request-timeout", "Seconds that a generation may take.", type=float)
@option(
    "--stall-timeout",
    "Seconds without a token or a beat after which a stream goes on at another target.",
    type=float,
)
@option("--read-timeout", "Seconds that headers, and then a body, may take to come.", type=float)
@option("--write-timeout", "Seconds after which a caller that reads nothing is left.", type=float)
@option("--refresh-seconds", "Between two looks at targets.", type=float)
@option("--discover-seconds", "Between two look-ups of a name.", type=float)
@option("--tls-cert", "Serve over TLS with this certificate (PEM).", type=Path)
@option("--tls-key", "Key of the certificate (PEM).", type=Path)
@option("--tls-ca", "Mutual TLS: callers need certificates signed by this one (PEM).", type=Path)
@option(
    "--token-file",
    "Callers need a key of this file (TOML: name, roles, token or sha256), the role generate.",
    type=Path,
)
@option(
    "--insecure",
    "Allow ports beyond this host that nothing guards, and keys in the clear to targets.",
    is_flag=True,
)
@option("--target-tls", "Reach targets over TLS, trusting whom the system trusts.", is_flag=True)
@option("--target-tls-ca", "Reach targets over TLS, trusting this CA (PEM).", type=Path)
@option("--target-tls-cert", "Certificate to show targets, for mutual TLS.", type=Path)
@option("--target-tls-key", "Its key.", type=Path)
@option(
    "--target-token-file",
    "File with the token that the gateway shows targets where it asks of its own accord, and for "
    "callers whose keys are not passed on.",
    type=Path,
)
@option(
    "--pass-keys/--no-pass-keys",
    "Show targets the keys of callers, so that roles and limits hold there. Keys that are not "
    "checked here (--token-file) give way to --target-token-file.",
)
@option("--drain-timeout", "Seconds that running requests get after SIGTERM.", type=float)
@option("--metrics-listen", "HOST:PORT of Prometheus metrics alone. /metrics has them, too.")
@option("--log-level", "How much to log.", type=click.Choice(LOG_LEVELS))
@option("--log-format", "Lines for people, or one JSON object a line.", type=click.Choice(FORMATS))
@option.check_config()
def serve(check_config: bool, **options: Any) -> None:
    """Serve OpenAI's HTTP API, and a page, in front of targets."""
    with running_command("gateway", options):
        _serve(GatewayConfig(**options), check_config)


def _serve(config: GatewayConfig, check_only: bool) -> None:
    check_gateway(config)
    with serving_extra("ssd-gateway", "gateway"):
        import uvloop

        from ssd_gateway.http.keys import check_limits
        from ssd_gateway.server import GatewayServer
        from ssd_serving.server_security import check_security

    check_security(config)
    check_limits(config)

    async def run() -> None:
        await GatewayServer(config).run()

    if check_only:
        click.echo(f"ok: {', '.join(config.target)}")
    else:
        uvloop.run(run())
