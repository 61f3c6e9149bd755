"""What an operator can set for a gateway."""

from dataclasses import dataclass
from pathlib import Path

from ssd_client.connection.endpoints import check_target
from ssd_engine.errors import ConfigError
from ssd_serving.config import check_bounds, check_listening

BOUNDS = {
    "max_body_mib": (1, 1024),
    "max_header_kib": (1, 1024),
    "max_connections": (1, 1_000_000),
    "request_timeout": (1, 86_400),
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
    cors_origin: tuple[str, ...] = ()
    page: bool = True
    allow_unknown_fields: bool = False
    max_body_mib: int = 16
    max_header_kib: int = 32
    max_connections: int = 4096
    request_timeout: float = 3600.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    refresh_seconds: float = 1.0
    discover_seconds: float = 10.0
    drain_timeout: float = 30.0
    metrics_listen: str | None = None
    log_level: str = "info"
    log_format: str = "text"


def check_gateway(config: GatewayConfig) -> None:
    """Raises ConfigError for what is wrong with the options themselves."""
    if not config.target:
        raise ConfigError("--target: at least one HOST:PORT or dns:///NAME:PORT is needed")
    for named in config.target:
        try:
            check_target(named)
        except ValueError as error:
            raise ConfigError(f"--target: {error}") from None
    check_bounds(config, BOUNDS)
    check_listening(config)
    if (config.target_tls_cert is None) != (config.target_tls_key is None):
        raise ConfigError("--target-tls-cert and --target-tls-key belong together: give both")
    for origin in config.cors_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ConfigError(f"--cors-origin: {origin!r} is not like https://HOST")
