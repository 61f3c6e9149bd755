"""What fits on a CUDA device: weights first, then whatever warm-up takes, then the KV cache."""

import logging
import math

import torch

from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions

log = logging.getLogger(__name__)

GIB = 1 << 30
GRAPH_BYTES = 512 << 20  # that captured steps and their modules may still take


def weight_bytes(config: ModelConfig, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's weights, about. The embedding is whole on each rank; so are the norms,
    which are small and counted as if they were divided."""
    shapes = expected_shapes(config)
    whole = sum(math.prod(s) for name, s in shapes.items() if "embed_tokens" in name)
    split = sum(math.prod(s) for name, s in shapes.items() if "embed_tokens" not in name)
    return (whole + split // ranks) * dtype.itemsize


def check_weights_fit(
    config: ModelConfig,
    options: RunnerOptions,
    ranks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    free, total = torch.cuda.mem_get_info(device)
    budget = free - (1 - options.gpu_memory_utilization) * total
    budget /= options.ranks_on(device.index)
    needed = weight_bytes(config, ranks, dtype)
    if needed <= budget:
        return
    more = (n for n in (2, 4, 8, 16, 32, 64) if n > ranks)
    fitting = next((n for n in more if weight_bytes(config, n, dtype) < 0.8 * budget), None)
    advice = f"--tp {fitting} would fit" if fitting else "take a smaller model or a larger device"
    raise ConfigError(
        f"the weights take {needed / GIB:.1f} GiB on each device, {max(0.0, budget) / GIB:.1f} GiB "
        f"of {total / GIB:.1f} are free under --gpu-memory-utilization "
        f"{options.gpu_memory_utilization:g}: {advice}"
    )


def blocks_on_device(options: RunnerOptions, bytes_per_block: int, device: torch.device) -> int:
    """After everything else that is allocated at start."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = free - (1 - options.gpu_memory_utilization) * total
    budget = budget / options.ranks_on(device.index) - GRAPH_BYTES - options.told_bytes
    log.info(
        "%.1f of %.1f GiB are free after warm-up, %.1f for the KV cache",
        free / GIB,
        total / GIB,
        max(0.0, budget) / GIB,
    )
    return max(0, int(budget) // bytes_per_block)


def needed_share(options: RunnerOptions, missing_bytes: float, device: torch.device) -> float:
    """The --gpu-memory-utilization that would give so many bytes more."""
    _, total = torch.cuda.mem_get_info(device)
    return options.gpu_memory_utilization + missing_bytes / total
