"""What an operator can set. The command line takes its defaults from here."""

from dataclasses import dataclass
from pathlib import Path

from ssd_engine.checkpoints.heads.head_config import HeadConfig, parse_aux_layers
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_serving.config import ServiceConfig, check_service_config

AUTO = "auto"
CONTEXT_WITHOUT_MODEL = 131_072  # tokens of a sequence
# A link's features on their way to its sequences, at most.
INBOX_BYTES = 64 << 20  # that have come
WAITING_BYTES = 64 << 20  # that were looked at, and wait
BOUNDS = {
    "max_links": (1, 4096),
    "max_links_per_identity": (1, 4096),
    "max_seqs_per_link": (1, 65_536),
    "depth": (1, 64),
    "budget": (1, 1024),
    "max_rows": (1, 65_536),
    "max_frames": (1, 1_000_000),
    "link_write_timeout": (1, 86_400),
    "feature_window": (128, 1_048_576),
}


@dataclass(frozen=True)
class DraftConfig(ServiceConfig):
    model: str | None = None
    listen: str = "127.0.0.1:7420"
    max_num_seqs: int = 64
    drain_timeout: float = 10.0
    keepalive_seconds: float = 20.0  # a target that vanished holds sequences
    speculator: str | None = None  # None: by what MODEL is
    target_model: str | None = None
    aux_layers: str | None = None
    feature_window: int = 1024
    max_links: int = 64
    max_links_per_identity: int | None = None
    max_seqs_per_link: int | None = None
    depth: int = 8
    budget: int = 24
    fan_out: str = AUTO
    fan_out_miss: str = AUTO
    max_rows: int = 256
    max_frames: int = 4096
    link_write_timeout: float = 10.0
    plane_ports: str | None = None


@dataclass(frozen=True)
class DraftHead:
    """A head in place of a draft model."""

    config: HeadConfig
    target: Path | None  # the directory of its target's model, for what the head lacks
    needs: FeatureNeeds  # of its target
    window: int  # positions of a sequence whose features are kept


@dataclass(frozen=True)
class DraftEngineOptions:
    """The options that the engine process is started with."""

    speculator: str  # a name of the registry
    model: ModelConfig | None  # None: speculates without one, and runner is None, too
    runner: RunnerOptions | None
    head: DraftHead | None  # what the model is, where it is one
    tp: int
    prefill_chunk: int
    depth: int  # tokens of the longest branch
    budget: int  # branches of a round
    fan_out_hit: tuple[int, ...] | None  # None: from measured rates
    fan_out_miss: tuple[int, ...] | None
    max_rows: int  # rows of a forward, at most
    max_num_seqs: int
    max_seqs_per_link: int | None
    vocab_size: int | None  # None: each target has its own
    max_context: int
    block_size: int
    listen_host: str  # where a tensor plane is offered, too
    plane_ports: range | None  # ports for tensor planes; None: any
    plane_kinds: tuple[PlaneKind, ...]  # that the operator allows
    log_level: str
    log_format: str
    check_integrity: bool
    trace_events: int


def check_config(config: DraftConfig) -> None:
    """Raises ConfigError for what is wrong without a look at the model."""
    check_service_config(config, BOUNDS)
    if config.max_rows < config.budget:
        raise ConfigError(
            f"--max-rows {config.max_rows} must be at least --budget {config.budget}: "
            "a forward holds a row for each branch"
        )
    fan_outs(config)
    parse_aux_layers(config.aux_layers)
    if plane_ports(config) is not None and config.plane_kind == PlaneKind.NCCL.value:
        raise ConfigError("--plane-ports: NCCL takes any port, so --plane-kind nccl needs none")


def plane_ports(config: DraftConfig) -> range | None:
    """Ports for tensor planes; None where any free one will do."""
    if config.plane_ports is None:
        return None
    low, dash, high = config.plane_ports.partition("-")
    numbers = [int(part) if _is_number(part) else 0 for part in (low, high)]
    if not dash or not 1 <= numbers[0] <= numbers[1] <= 65_535:
        raise ConfigError(
            "--plane-ports: a range of ports such as 7500-7599 is needed, "
            f"got {config.plane_ports!r}"
        )
    return range(numbers[0], numbers[1] + 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6


def fan_outs(config: DraftConfig) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The fan-outs after a speculation from the cache, and after any other."""
    return (
        _parse_fan_out("--fan-out", config.fan_out, config),
        _parse_fan_out("--fan-out-miss", config.fan_out_miss, config),
    )


def _parse_fan_out(flag: str, text: str, config: DraftConfig) -> tuple[int, ...] | None:
    if text == AUTO:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_number, parts)):
        raise ConfigError(f"{flag}: auto, or a list such as 3,2,1 is needed, got {text!r}")
    values = tuple(map(int, parts))
    if len(values) > config.depth + 1:
        raise ConfigError(
            f"{flag}: at most {config.depth + 1} numbers (for 0 to --depth {config.depth} "
            f"accepted tokens), got {len(values)}"
        )
    # The last number stands for all later ones, too. Without any branch, all that is speculated is
    # what targets wait for.
    branches = sum(values) + values[-1] * (config.depth + 1 - len(values))
    if branches > config.budget:
        raise ConfigError(
            f"{flag}: {text} makes {branches} branches for a speculation of {config.depth} "
            f"tokens, at most {config.budget} (--budget) are possible"
        )
    return values


def scratch_tokens(config: DraftConfig) -> int:
    """Room for the branches of one sequence, in whole blocks."""
    blocks = -(-(config.depth + 1) * config.budget // config.block_size)
    return blocks * config.block_size
