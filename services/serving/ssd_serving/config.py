"""What an operator can set for any service. No gRPC, no torch: command lines read it."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ssd_engine.checkpoints.model_config import ModelConfig, check_tensor_parallel
from ssd_engine.checkpoints.model_expansion import ModelShape, grow_config, parse_shape
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions, parse_devices
from ssd_engine.process.addresses import split_address
from ssd_engine.tensor_plane.protocol.handshake import ANY_KIND, PlaneKind
from ssd_serving.observability.telemetry import check_otlp_endpoint

DEVICES = ("auto", "cpu", "cuda")
PROMPT_ROWS = {"cpu": 128, "cuda": 512}
LOG_LEVELS = ("debug", "info", "warning", "error")
Bounds = Mapping[str, tuple[float, float]]
BOUNDS: Bounds = {
    "tp": (1, 64),
    "max_model_len": (8, 10_000_000),
    "max_num_seqs": (1, 65_536),
    "prefill_chunk": (4, 1_000_000),
    "block_size": (4, 1024),
    "num_kv_blocks": (1, 100_000_000),
    "threads": (1, 1024),
    "drain_timeout": (0, 86_400),
    "engine_timeout": (1, 86_400),
    "engine_restarts": (0, 1000),
    "max_message_mib": (1, 1024),
    "keepalive_seconds": (10, 86_400),
    "trace_events": (0, 10_000_000),
}


@dataclass(frozen=True)
class ServiceConfig:
    """The options of any service. Each service adds its own, and sets its own address."""

    model: str | None
    listen: str = "127.0.0.1:0"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    health_listen: str | None = None
    port_file: Path | None = None
    name: str | None = None
    tp: int = 1
    device: str = "auto"
    devices: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    allow_long_context: bool = False
    max_num_seqs: int = 32
    prefill_chunk: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    eager: bool = False
    kernels: str = "auto"
    kernel_cache: Path | None = None
    self_check: bool | None = None
    threads: int | None = None
    expand_to: str | None = None
    plane_kind: str = ANY_KIND
    drain_timeout: float = 30.0
    engine_timeout: float = 60.0
    engine_restarts: int = 3
    max_message_mib: int = 16
    keepalive_seconds: float = 60.0
    reflection: bool = False
    metrics_listen: str | None = None
    trace_events: int = 0
    log_level: str = "info"
    log_format: str = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    check_integrity: bool = False

    @property
    def local_ranks(self) -> int:
        """Ranks that run on this node."""
        return self.tp

    @property
    def prompt_rows(self) -> int:
        """The most rows of a prefill forward. Everybody waits for one that has begun: on a CPU
        more rows make it longer, and hardly more of them a second."""
        default = PROMPT_ROWS[_device(self)]
        return self.prefill_chunk or -(-default // self.block_size) * self.block_size


def max_message_bytes(config: ServiceConfig, needed: int | None = None) -> int:
    """What the operator allows, or less where no message needs as much."""
    allowed = config.max_message_mib * 1024 * 1024
    return allowed if needed is None else min(allowed, needed)


def parse_address(option: str, value: str) -> tuple[str, int]:
    """The host and port of HOST:PORT or [IPv6]:PORT."""
    try:
        return split_address(value)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def check_service_config(config: ServiceConfig, own_bounds: Bounds) -> None:
    """Raises ConfigError for what is wrong without a look at the model."""
    check_listening(config)
    if config.health_listen is not None:
        parse_address("--health-listen", config.health_listen)
    if config.otlp_endpoint is not None:
        check_otlp_endpoint(config.otlp_endpoint)
    check_bounds(config, {**BOUNDS, **own_bounds})
    if config.prompt_rows % config.block_size:
        raise ConfigError(
            f"--prefill-chunk {config.prefill_chunk} must be a multiple of "
            f"--block-size {config.block_size}"
        )
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be in (0, 1], got {config.gpu_memory_utilization:g}"
        )
    if config.plane_kind == PlaneKind.NCCL.value and _device(config) != "cuda":
        raise ConfigError("--plane-kind nccl joins GPUs, but this service runs on a CPU")
    if config.kernel_cache is not None and config.kernel_cache.is_file():
        raise ConfigError(f"--kernel-cache: {config.kernel_cache} is a file, not a directory")


class ListeningConfig(Protocol):
    """The options of a port that callers connect to."""

    @property
    def listen(self) -> str: ...
    @property
    def metrics_listen(self) -> str | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_ca(self) -> Path | None: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def port_file(self) -> Path | None: ...


def check_listening(config: ListeningConfig) -> None:
    """Beyond this host nothing listens unguarded, unless the operator says so."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both, or none")
    if config.tls_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-ca needs --tls-cert and --tls-key: it asks clients for theirs")
    with_tls = config.tls_cert is not None
    _check_exposure(config, "--listen", config.listen, knows_callers(config), CALLERS[with_tls])
    if config.metrics_listen is not None:
        _check_exposure(config, "--metrics-listen", config.metrics_listen, with_tls, METRICS)
    _check_port_file(config.port_file)


def knows_callers(config: ListeningConfig) -> bool:
    """Whether callers show who they are. TLS alone encrypts, and lets everybody in."""
    return config.tls_ca is not None or config.token_file is not None


METRICS = "nothing guards it; give --tls-cert and --tls-key"
CALLERS = {
    False: f"{METRICS} with --tls-ca, or --token-file",
    True: "TLS alone lets everybody in; give --tls-ca, or --token-file",
}


def _check_exposure(
    config: ListeningConfig, flag: str, address: str, guarded: bool, lacks: str
) -> None:
    host, _ = parse_address(flag, address)
    if guarded or config.insecure or is_loopback(host):
        return
    raise ConfigError(
        f"{flag} {address}: other hosts could connect, and {lacks}, listen on 127.0.0.1, or say "
        "--insecure"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bounds(config: Any, bounds: Bounds) -> None:
    """None, where it is allowed, leaves the choice to the server. NaN is out of every bound."""
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: must be in [{low}, {high}], got {value:g}")


def _check_port_file(path: Path | None) -> None:
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--port-file: {path.parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"--port-file: {path} is a directory, a file is needed")


@dataclass(frozen=True)
class StepSizes:
    """The sizes of forwards that are not prefills; the names are those of RunnerOptions."""

    max_rows: int
    max_tail: int = 0
    exact: bool = True
    step_rows: int = 0
    branches: int = 0
    ranks: int = 1
    max_path: int = 0


def runner_options(
    config: ServiceConfig, model: ModelConfig, directory: Path, sizes: StepSizes
) -> RunnerOptions:
    """Settle what is left to the server, and check what the model does not allow."""
    shape = None if config.expand_to is None else parse_shape(config.expand_to)
    check_tensor_parallel(grow_config(model, shape or ModelShape()), config.tp)
    device = _device(config)
    return RunnerOptions(
        directory=directory,
        dtype=_dtype(config, model, device),
        device=device,
        block_size=config.block_size,
        max_model_len=_max_model_len(config, model),
        max_num_seqs=config.max_num_seqs,
        max_forward_tokens=max(config.prompt_rows, sizes.max_rows),
        num_kv_blocks=config.num_kv_blocks,
        gpu_memory_utilization=config.gpu_memory_utilization,
        threads=config.threads,
        expand_to=shape,
        max_tail=sizes.max_tail,
        exact=sizes.exact,
        eager=config.eager,
        kernels=config.kernels,
        kernel_cache=config.kernel_cache,
        devices=parse_devices(config.devices, device, config.local_ranks),
        self_check=device == "cuda" if config.self_check is None else config.self_check,
        step_rows=sizes.step_rows,
        branches=sizes.branches,
        ranks=sizes.ranks,
        max_path=sizes.max_path,
    )


def _device(config: ServiceConfig) -> str:
    """A CUDA device is looked for without torch: the front process does not load it."""
    if config.device != "auto":
        return config.device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return "cuda" if visible and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def _dtype(config: ServiceConfig, model: ModelConfig, device: str) -> str:
    """On a CPU it is float32: exact means equal tokens, and few CPUs compute bf16 any faster."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else model.dtype


def _max_model_len(config: ServiceConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit and not config.allow_long_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the model's {limit} positions; "
            "--allow-long-context serves it all the same, for timing"
        )
    return config.max_model_len
