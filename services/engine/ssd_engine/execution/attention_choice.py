"""Chooses the attention backend for a device."""

import importlib.util
import logging

import torch

from ssd_engine.attention.base import AttentionBackend
from ssd_engine.attention.cpu import CpuBackend, choose_row_attention
from ssd_engine.attention.sdpa import SdpaBackend
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner_options import RunnerOptions

log = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
FLASHINFER_DIMS = (64, 128, 256)
OWN_DIMS = (16, 32, 64, 128, 256)  # sizes of heads that our kernels are written for


def is_tuned(
    config: ModelConfig, options: RunnerOptions, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether there are kernels of our own for it; the rest is torch's, as on a CPU."""
    if options.kernels == "torch":
        return False
    return device.type == "cuda" and dtype in HALVES and config.head_dim in OWN_DIMS


def make_attention(
    config: ModelConfig,
    options: RunnerOptions,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The attention of prefill, and of every forward that is not a step of few rows."""
    rows = choose_row_attention(options.kernels, dtype, device)
    if rows is not None:
        log.info("attention: our own kernel, for %s", rows.instructions)
        return CpuBackend(rows, num_heads, num_kv_heads)
    if not is_tuned(config, options, dtype, device):
        return SdpaBackend(num_heads, num_kv_heads, options.block_size, dtype, device)
    dim = config.head_dim
    flashinfer = options.kernels == "auto" and dim in FLASHINFER_DIMS
    if flashinfer and importlib.util.find_spec("flashinfer") is not None:
        from ssd_engine.attention.flashinfer import FlashInferBackend

        log.info("prefill attention: FlashInfer")
        return FlashInferBackend(
            num_heads,
            num_kv_heads,
            dim,
            options.block_size,
            dtype,
            device,
            exact=options.exact,
        )
    from ssd_engine.attention.paged import PagedBackend

    log.info("prefill attention: Triton")
    return PagedBackend(
        num_heads, num_kv_heads, dim, options.block_size, options.max_model_len, device
    )
