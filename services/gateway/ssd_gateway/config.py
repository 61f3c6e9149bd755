"""What an operator can set for a gateway."""

from dataclasses import dataclass
from pathlib import Path

from ssd_client.connection.endpoints import DNS, check_target
from ssd_client.connection.security import is_loopback
from ssd_engine.errors import ConfigError
from ssd_serving.config import check_bounds, check_listening

BOUNDS = {
    "max_body_mib": (1, 1024),
    "max_bodies_mib": (1, 65_536),
    "max_header_kib": (1, 1024),
    "max_connections": (1, 1_000_000),
    "request_timeout": (1, 86_400),
    "stall_timeout": (6, 86_400),  # more than what is between two beats of a target
    "read_timeout": (1, 3600),
    "write_timeout": (1, 3600),
    "drain_timeout": (0, 86_400),
    "refresh_seconds": (0.05, 3600),
    "discover_seconds": (0.05, 86_400),
}


@dataclass(frozen=True)
class GatewayConfig:
    target: tuple[str, ...] = ()
    listen: str = "127.0.0.1:8000"
    port_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    target_tls: bool = False
    target_tls_ca: Path | None = None
    target_tls_cert: Path | None = None
    target_tls_key: Path | None = None
    target_token_file: Path | None = None
    pass_keys: bool = True
    cors_origin: tuple[str, ...] = ()
    page: bool = True
    draft_traces: bool = True
    allow_unknown_fields: bool = False
    tool_parser: str = "auto"
    max_body_mib: int = 16
    max_bodies_mib: int = 64
    max_header_kib: int = 32
    max_connections: int = 4096
    request_timeout: float = 3600.0
    stall_timeout: float = 10.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    refresh_seconds: float = 1.0
    discover_seconds: float = 10.0
    drain_timeout: float = 30.0
    metrics_listen: str | None = None
    log_level: str = "info"
    log_format: str = "text"


def _may_be_told(config: GatewayConfig, named: str) -> bool:
    """Whether a secret may be sent there."""
    over_tls = config.target_tls or config.target_tls_ca or config.target_tls_cert
    host = named.removeprefix(DNS).rpartition(":")[0]
    return bool(over_tls) or config.insecure or is_loopback(host)


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError for what is wrong with the options themselves."""
    if not config.target:
        raise ConfigError("--target: at least one HOST:PORT or dns:///NAME:PORT is needed")
    for named in config.target:
        try:
            check_target(named)
        except ValueError as error:
            raise ConfigError(f"--target: {error}") from None
        if config.target_token_file is not None and not _may_be_told(config, named):
            raise ConfigError(
                f"--target-token-file: the token would travel in the clear to {named}; give "
                "--target-tls-ca or --target-tls, or say --insecure"
            )
    check_bounds(config, BOUNDS)
    if config.max_bodies_mib < config.max_body_mib:
        raise ConfigError(
            f"--max-bodies-mib: {config.max_bodies_mib} has no room for one body of "
            f"--max-body-mib {config.max_body_mib}"
        )
    check_listening(config)
    if (config.target_tls_cert is None) != (config.target_tls_key is None):
        raise ConfigError("--target-tls-cert and --target-tls-key belong together: give both")
    for origin in config.cors_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ConfigError(f"--cors-origin: {origin!r} is not like https://HOST")
