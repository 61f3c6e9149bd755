"""What an operator can set. The command line takes its defaults from here."""

from dataclasses import dataclass

from ssd_engine.config import ModelConfig
from ssd_engine.errors import ConfigError
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.serving.config import ServiceConfig, check_service_config, parse_address
from ssd_target.speculation.options import Backup, Mode, SpeculationOptions

MODES = ("auto", "ssd", "sync", "off")
BACKUPS = {
    "auto": Backup.AUTO,
    "jit": Backup.JUST_IN_TIME,
    "ngram": Backup.NGRAM,
    "none": Backup.NONE,
}
MAX_WAIT_MS = 10_000
BOUNDS = {
    "max_waiting": (0, 1_000_000),
    "write_timeout": (1, 86_400),
    "max_backlog_kib": (16, 67_108_864),
    "depth": (1, 64),
    "link_timeout": (0.05, 3600),
    "synthetic_acceptance": (0.01, 1),
}


@dataclass(frozen=True)
class TargetConfig(ServiceConfig):
    model: str
    listen: str = "127.0.0.1:7410"
    max_waiting: int = 256
    exact: bool = True
    write_timeout: float = 60.0
    max_backlog_kib: int = 16_384
    mode: str = "auto"
    draft: tuple[str, ...] = ()
    allow_draft: tuple[str, ...] = ()
    trust_draft: tuple[str, ...] = ()
    draft_model: str | None = None
    draft_expand_to: str | None = None
    depth: int = 5
    adapt_depth: bool = True
    wait: str = "auto"
    backup: str = "auto"
    auto_off: bool = True
    link_timeout: float = 2.0
    synthetic_acceptance: float | None = None


@dataclass(frozen=True)
class EngineOptions:
    """What the engine process is started with."""

    model: ModelConfig
    runner: RunnerOptions
    tp: int
    prefill_chunk: int
    log_level: str
    check_integrity: bool
    trace_events: int
    synthetic_acceptance: float | None
    speculation: SpeculationOptions
    draft_model: ModelConfig | None  # of synchronous speculation
    draft_runner: RunnerOptions | None


def check_config(config: TargetConfig) -> None:
    check_service_config(config, BOUNDS)
    for address in config.draft:
        parse_address("--draft", address)
    if config.draft_expand_to is not None and config.draft_model is None:
        raise ConfigError("--draft-expand-to needs --draft-model")
    speculation_options(config)


def modes(config: TargetConfig) -> tuple[Mode, ...]:
    """What requests may ask for, the default first."""
    possible = [Mode.OFF]
    if config.draft_model is not None:
        possible.insert(0, Mode.SYNC)
    if config.draft or config.allow_draft:
        possible.insert(0 if config.draft else len(possible), Mode.SSD)
    if config.mode == "auto":
        return tuple(possible)
    chosen = Mode[config.mode.upper()]
    if chosen is Mode.SYNC and config.draft_model is None:
        raise ConfigError("--mode sync needs --draft-model")
    if chosen is Mode.SSD and not config.draft:
        raise ConfigError("--mode ssd needs --draft HOST:PORT")
    return (chosen, *(mode for mode in possible if mode is not chosen))


def speculation_options(config: TargetConfig) -> SpeculationOptions:
    return SpeculationOptions(
        mode=modes(config)[0],
        depth=config.depth,
        adapt_depth=config.adapt_depth,
        backup=BACKUPS[config.backup],
        wait_seconds=_wait_seconds(config.wait),
        auto_off=config.auto_off,
        link_timeout=config.link_timeout,
    )


def _wait_seconds(wait: str) -> float | None:
    if wait == "auto":
        return None
    try:
        milliseconds = float(wait)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= MAX_WAIT_MS:
        raise ConfigError(
            f"--wait: auto or milliseconds in [0, {MAX_WAIT_MS}] are needed, got {wait!r}"
        )
    return milliseconds / 1000
