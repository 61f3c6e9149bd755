"""What an operator can set. The command line takes its defaults from here."""

from dataclasses import dataclass
from pathlib import Path

from ssd_engine.checkpoints.heads.head_config import NUM_FEATURES, HeadConfig, parse_aux_layers
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.parallel.cluster.options import ClusterOptions, read_secret
from ssd_engine.process.secret_files import warn_of_readers
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.streams import VALUE_BYTES
from ssd_serving.config import ServiceConfig, check_service_config, parse_address
from ssd_target.links.endpoint_addresses import parse_draft
from ssd_target.records.speculation_options import (
    HEAD_WINDOW,
    Backup,
    FeatureOptions,
    Mode,
    SpeculationOptions,
)

MODES = ("auto", "ssd", "sync", "off")
BACKUPS = {
    "auto": Backup.AUTO,
    "jit": Backup.JUST_IN_TIME,
    "ngram": Backup.NGRAM,
    "none": Backup.NONE,
}
GENERATION_CONFIGS = ("model", "none")
MAX_WAIT_MS = 10_000
BOUNDS = {
    "swap_gib": (0, 16_384),
    "max_waiting": (0, 1_000_000),
    "write_timeout": (1, 86_400),
    "max_backlog_kib": (16, 67_108_864),
    "depth": (1, 64),
    "link_timeout": (0.05, 3600),
    "feature_window": (1, 1_000_000),
    "keep_features": (0, 67_108_864),
    "discover_seconds": (0.1, 3600),
    "synthetic_acceptance": (0.01, 1),
    "limit_requests": (1, 1_000_000),
    "limit_tokens_per_minute": (1, 10_000_000_000),
    "limit_prompt_tokens": (1, 10_000_000),
    "nodes": (1, 64),
    "join_timeout": (1, 86_400),
    "cluster_timeout": (1, 3600),
}

MOST_HEAD_BYTES = 2 << 30  # of features that a head inside the target keeps

# Rows of a sequence in a step of the draft model inside the target: a drafted token that was right
# is not in its cache yet when the next one is drafted.
DRAFT_STEP_ROWS = 2


@dataclass(frozen=True)
class TargetConfig(ServiceConfig):
    model: str
    listen: str = "127.0.0.1:7410"
    max_waiting: int = 256
    write_timeout: float = 60.0
    max_backlog_kib: int = 16_384
    generation_config: str = "model"
    chat_template: Path | None = None
    allow_control_tokens: bool = False
    swap_gib: float = 0.0
    share_prefixes: bool = False
    mode: str = "auto"
    draft: tuple[str, ...] = ()
    allow_draft: tuple[str, ...] = ()
    trust_draft: tuple[str, ...] = ()
    discover_seconds: float = 5.0
    draft_model: str | None = None
    draft_expand_to: str | None = None
    aux_layers: str | None = None
    depth: int = 5
    adapt_depth: bool = True
    wait: str = "auto"
    backup: str = "auto"
    auto_off: bool = True
    link_timeout: float = 2.0
    feature_window: int = 1024
    keep_features: int = 0
    synthetic_acceptance: float | None = None
    draft_tls_ca: Path | None = None
    draft_token_file: Path | None = None
    insecure_plane: bool = False
    limit_requests: int | None = None
    limit_tokens_per_minute: int | None = None
    limit_prompt_tokens: int | None = None
    nodes: int = 1
    cluster_listen: str | None = None
    cluster_secret_file: Path | None = None
    join_timeout: float = 600.0
    cluster_timeout: float = 30.0

    @property
    def local_ranks(self) -> int:
        return self.tp // self.nodes


@dataclass(frozen=True)
class JoinConfig:
    """The options of ``ssd-target join``, which runs a node that computes for a leader."""

    leader: str | None = None
    node: int | None = None
    cluster_secret_file: Path | None = None
    model: str | None = None
    device: str = "auto"
    devices: str | None = None
    threads: int | None = None
    kernel_cache: Path | None = None
    join_timeout: float = 600.0
    health_listen: str | None = None
    log_level: str | None = None
    log_format: str = "text"


@dataclass(frozen=True)
class HeadOptions:
    """A head that drafts inside the target."""

    config: HeadConfig
    target: Path  # the directory of the target's model
    runner: RunnerOptions
    kept_bytes: int  # for the features that it keeps, beside the target's KV


@dataclass(frozen=True)
class EngineOptions:
    """The options that the engine process is started with."""

    model: ModelConfig
    runner: RunnerOptions
    tp: int
    prefill_chunk: int
    log_level: str
    log_format: str
    check_integrity: bool
    trace_events: int
    synthetic_acceptance: float | None
    swap_gib: float
    speculation: SpeculationOptions
    features: FeatureOptions
    draft_model: ModelConfig | None  # for synchronous speculation
    draft_runner: RunnerOptions | None
    head: HeadOptions | None  # in place of these two
    cluster: ClusterOptions | None  # None: all ranks are on one node
    plane_kinds: tuple[PlaneKind, ...]  # that the operator allows
    hides_rows: bool = False  # links have TLS: what travels beside them does not leave the host


def check_config(config: TargetConfig) -> None:
    check_service_config(config, BOUNDS)
    for address in config.draft:
        parse_draft(address)
    if config.draft_expand_to is not None and config.draft_model is None:
        raise ConfigError("--draft-expand-to needs --draft-model")
    if config.aux_layers is not None and config.draft_model is None:
        raise ConfigError("--aux-layers needs --draft-model, an EAGLE-3 head")
    parse_aux_layers(config.aux_layers)
    if config.keep_features and not (config.draft or config.allow_draft):
        raise ConfigError(
            "--keep-features needs --draft or --allow-draft: only drafts that are linked are told"
        )
    modes(config)
    speculation_options(config)
    _check_cluster(config)


def _check_cluster(config: TargetConfig) -> None:
    listen, secret = config.cluster_listen, config.cluster_secret_file
    if config.nodes == 1:
        if listen is not None or secret is not None:
            flag = "--cluster-secret-file" if listen is None else "--cluster-listen"
            raise ConfigError(f"{flag} needs --nodes, 2 or more")
        return
    if config.tp % config.nodes:
        raise ConfigError(
            f"--tp {config.tp} must be a multiple of --nodes {config.nodes}: each node runs as "
            "many ranks"
        )
    if listen is None:
        raise ConfigError(f"--nodes {config.nodes} needs --cluster-listen HOST:PORT")
    if secret is None:
        raise ConfigError(f"--nodes {config.nodes} needs --cluster-secret-file FILE")
    parse_address("--cluster-listen", listen)
    read_secret(secret)
    warn_of_readers("--cluster-secret-file", secret)


def modes(config: TargetConfig) -> tuple[Mode, ...]:
    """Modes that requests may name; first the one that a server begins with that chooses itself."""
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


def default_mode(config: TargetConfig) -> Mode:
    """Requests that name none get what measures fastest, unless the operator says otherwise."""
    first = modes(config)[0]
    chooses = config.mode == "auto" and config.auto_off and first is not Mode.OFF
    return Mode.AUTO if chooses else first


def speculation_options(config: TargetConfig) -> SpeculationOptions:
    return SpeculationOptions(
        endpoints=bool(config.draft or config.allow_draft),
        depth=config.depth,
        adapt_depth=config.adapt_depth,
        backup=BACKUPS[config.backup],
        wait_seconds=_wait_seconds(config.wait),
        auto_off=config.auto_off,
        link_timeout=config.link_timeout,
    )


def feature_options(config: TargetConfig, model: ModelConfig, dtype: str) -> FeatureOptions:
    """``model`` as it is grown."""
    row_bytes = NUM_FEATURES * model.hidden_size * VALUE_BYTES[dtype]
    return FeatureOptions(
        model.hidden_size,
        config.feature_window,
        config.feature_window * row_bytes,
        config.keep_features << 20,
    )


def head_bytes(config: TargetConfig, head: HeadConfig, hidden_size: int, dtype: str) -> int:
    """The device's memory for what a head inside the target keeps of its features."""
    row_bytes = len(head.boundaries or ()) * hidden_size * VALUE_BYTES[dtype]
    return min(config.max_num_seqs * HEAD_WINDOW * row_bytes, MOST_HEAD_BYTES)


def feature_bytes(config: TargetConfig, options: FeatureOptions) -> int:
    """The host's memory that features may take, where links can ask for them."""
    if not speculation_options(config).endpoints:
        return 0
    return config.max_num_seqs * options.window_bytes + options.keep_bytes


def check_feature_memory(needed: int, available: int) -> None:
    if needed > available:
        raise ConfigError(
            f"--keep-features, --feature-window: hidden states may take {needed / 2**30:.1f} GiB "
            f"of the host's memory, of which {available / 2**30:.1f} GiB are free: keep less, or "
            "fewer sequences (--max-num-seqs)"
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
