"""What an operator can set. The command line takes its defaults from here."""

import os
from dataclasses import dataclass
from pathlib import Path

from ssd_engine.config import ModelConfig, check_tensor_parallel
from ssd_engine.errors import ConfigError
from ssd_engine.runner_options import DTYPE_NAMES, RunnerOptions

DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
BOUNDS = {
    "tp": (1, 64),
    "max_model_len": (8, 10_000_000),
    "max_num_seqs": (1, 65_536),
    "max_waiting": (0, 1_000_000),
    "prefill_chunk": (4, 1_000_000),
    "block_size": (4, 1024),
    "num_kv_blocks": (1, 100_000_000),
    "threads": (1, 1024),
    "drain_timeout": (0, 86_400),
    "write_timeout": (1, 86_400),
    "max_message_mib": (1, 1024),
    "keepalive_seconds": (10, 86_400),
}


@dataclass(frozen=True)
class TargetConfig:
    model: str
    listen: str = "127.0.0.1:7410"
    port_file: Path | None = None
    name: str | None = None
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    allow_long_context: bool = False
    max_num_seqs: int = 32
    max_waiting: int = 256
    prefill_chunk: int = 512
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    threads: int | None = None
    drain_timeout: float = 30.0
    write_timeout: float = 60.0
    max_message_mib: int = 16
    keepalive_seconds: float = 60.0
    reflection: bool = False
    metrics_listen: str | None = None
    log_level: str = "info"
    check_integrity: bool = False


@dataclass(frozen=True)
class EngineOptions:
    """What the engine process is started with."""

    model: ModelConfig
    runner: RunnerOptions
    tp: int
    prefill_chunk: int
    log_level: str
    check_integrity: bool


def parse_address(option: str, value: str) -> tuple[str, int]:
    """HOST:PORT, [IPv6]:PORT."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option}: HOST:PORT with a port up to 65535 is needed, got {value!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_config(config: TargetConfig) -> None:
    """Everything that can be judged without looking at the model."""
    parse_address("--listen", config.listen)
    if config.metrics_listen is not None:
        parse_address("--metrics-listen", config.metrics_listen)
    for name, (low, high) in BOUNDS.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: must be in [{low}, {high}], got {value:g}")
    if config.prefill_chunk % config.block_size:
        raise ConfigError(
            f"--prefill-chunk {config.prefill_chunk} must be a multiple of "
            f"--block-size {config.block_size}"
        )
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be in (0, 1], got {config.gpu_memory_utilization:g}"
        )
    if config.port_file is not None and not config.port_file.parent.is_dir():
        raise ConfigError(f"--port-file: {config.port_file.parent} is not a directory")
    if config.port_file is not None and config.port_file.is_dir():
        raise ConfigError(f"--port-file: {config.port_file} is a directory, a file is needed")


def runner_options(config: TargetConfig, model: ModelConfig, directory: Path) -> RunnerOptions:
    """Settle what is left to the server, and check what the model does not allow."""
    check_tensor_parallel(model, config.tp)
    device = _device(config)
    return RunnerOptions(
        directory=directory,
        dtype=_dtype(config, model, device),
        device=device,
        block_size=config.block_size,
        max_model_len=_max_model_len(config, model),
        max_num_seqs=config.max_num_seqs,
        max_forward_tokens=max(config.prefill_chunk, config.max_num_seqs),
        num_kv_blocks=config.num_kv_blocks,
        gpu_memory_utilization=config.gpu_memory_utilization,
        threads=config.threads,
    )


def _device(config: TargetConfig) -> str:
    """A CUDA device is looked for without torch: the front process does not load it."""
    if config.device != "auto":
        return config.device
    found = any(Path("/dev").glob("nvidia[0-9]*")) and _visible_devices()
    return "cuda" if found else "cpu"


def _visible_devices() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def _dtype(config: TargetConfig, model: ModelConfig, device: str) -> str:
    """On CPU float32: exact there means equal tokens, and few CPUs compute bf16 any faster."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        return "float32"
    return model.dtype if model.dtype in DTYPE_NAMES else "bfloat16"


def _max_model_len(config: TargetConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit and not config.allow_long_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the model's {limit} positions; "
            "--allow-long-context serves it all the same, for timing"
        )
    return config.max_model_len
