"""The training loop that the target and the draft share."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.data import Feed, rows_of
from tools.train.model import MAX_POSITIONS, Llama, compute_dtype

log = logging.getLogger("train")

ROW = 1024


@dataclass(frozen=True)
class Plan:
    """How long, how fast and on what rows a model is trained."""

    steps: int
    batch_tokens: int
    peak_rate: float
    weight_decay: float
    warm_up: float = 0.02
    long_share: float = 0.1

    def row_at(self, step: int) -> int:
        """The last steps see rows as long as the model's context, so that all of it works."""
        return MAX_POSITIONS if step >= (1 - self.long_share) * self.steps else ROW

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then linear decay to zero."""
        rise = (step + 1) / max(1, round(self.warm_up * self.steps))
        fall = (self.steps - step) / (self.steps * (1 - self.warm_up))
        return self.peak_rate * min(1.0, rise, fall)


def autocast(device: torch.device) -> torch.autocast:
    dtype = compute_dtype(device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def compile_blocks(model: Llama) -> None:
    """Compile the block, not the model: its code is built once and shared by all layers."""
    for block in model.model.layers:
        block.compile(dynamic=False)


def optimizer_of(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; norm weights are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.95), fused=True)


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    feed: Feed,
    plan: Plan,
    check: Callable[[], str],
    checks: int = 12,
) -> None:
    """Minimise ``loss_of`` (rows [n, row + 1] to a scalar); log ``check()`` as it goes."""
    optimizer = optimizer_of(model, plan)
    every = max(1, plan.steps // checks)
    began = time.monotonic()
    model.train()
    for step in range(plan.steps):
        row = plan.row_at(step)
        if step % every == 0 or row != plan.row_at(max(0, step - 1)):
            log.info("step %d, %.0f s: %s", step, time.monotonic() - began, check())
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        loss_of(feed.take(plan.batch_tokens // row, row)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    log.info("step %d, %.0f s: %s", plan.steps, time.monotonic() - began, check())


@torch.no_grad()
def loss_by_position(model: Llama, stream: Tensor, batch: int = 16) -> Tensor:
    """Cross-entropy in nats at each position of packed rows as long as the context."""
    model.eval()
    rows = rows_of(stream, MAX_POSITIONS)
    total = torch.zeros(MAX_POSITIONS, device=stream.device)
    for part in rows.split(batch):
        with autocast(stream.device), torch.compiler.set_stance("force_eager"):
            logits = model(part[:, :-1])
        losses = F.cross_entropy(logits.float().mT, part[:, 1:], reduction="none")
        total += losses.sum(0)
    model.train()
    return total / len(rows)


def describe(losses: Tensor) -> str:
    """One line about the result of ``loss_by_position``, to see whether the far half works."""
    bands = [losses[a:b].mean().item() for a, b in ((0, 1024), (512, 1024), (1024, 2048))]
    return "validation loss {:.4f} (positions 512-1023 {:.4f}, 1024-2047 {:.4f})".format(*bands)
