"""An attention backend against SDPA in float32 on the same cache.

    python -m tools.gpu.attention_check [--cases 20] [--seed 0]

Prints, for each use that an engine makes of it, the worst error of a run relative to the size of
its result, and how many rows were left unwritten. Every run is compared with itself alone, so that
a batch that mixes its runs up is seen, too.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssd_engine.attention.base import AttentionBackend, QueryRun, Run, TreeRun
from ssd_engine.attention.sdpa import SdpaBackend
from ssd_engine.kvcache.cache import LayerCache

CUDA = torch.device("cuda")
DUMMY_BLOCK = 0
USES = ("prefill", "prefill after a prefix", "decode", "verify", "tree", "all at once")


@dataclass(frozen=True)
class Setting:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA
    longest: int = 9000  # context
    most_runs: int = 16
    few_rows: int = 8  # of a verification, at most
    prefill_rows: int = 512  # of a chunk after a prefix, at most
    most_branches: int = 40

    @property
    def num_blocks(self) -> int:
        return 2 * -(-self.longest // self.block_size) + 8


BackendFactory = Callable[[Setting], AttentionBackend]
DEFAULT = Setting()
SMALL = Setting(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
    device=torch.device("cpu"),
    longest=150,
    most_runs=2,
    few_rows=4,
    prefill_rows=20,
    most_branches=5,
)


def sdpa(setting: Setting) -> AttentionBackend:
    s = setting
    return SdpaBackend(s.num_heads, s.num_kv_heads, s.block_size, s.dtype, s.device)


def flashinfer(exact: bool) -> BackendFactory:
    from ssd_engine.attention.flashinfer import FlashInferBackend  # only where there is a device

    def make(setting: Setting) -> AttentionBackend:
        s = setting
        return FlashInferBackend(
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            s.block_size,
            s.dtype,
            s.device,
            exact=exact,
            dummy_block=DUMMY_BLOCK,
        )

    return make


def paged(setting: Setting) -> AttentionBackend:
    """The kernel of steps."""
    from ssd_engine.attention.paged import PagedBackend

    s = setting
    most = s.longest + s.few_rows
    return PagedBackend(s.num_heads, s.num_kv_heads, s.head_dim, s.block_size, most, s.device)


class Cases:
    """Random forwards over one cache. Runs only read it, so that their blocks may overlap."""

    def __init__(self, seed: int, setting: Setting = DEFAULT) -> None:
        self.setting = setting
        self.rng = random.Random(seed)
        self.generator = torch.Generator(setting.device).manual_seed(seed)
        shape = (setting.num_blocks, setting.block_size, setting.num_kv_heads, setting.head_dim)
        # Weights that differ, so that a key too few or too many is seen.
        self.cache = LayerCache(2 * self.randn(*shape), self.randn(*shape))
        self.cache.key[DUMMY_BLOCK] = self.cache.value[DUMMY_BLOCK] = 30  # must have no weight

    def randn(self, *shape: int) -> Tensor:
        out = torch.randn(shape, generator=self.generator, device=self.setting.device)
        return out.to(self.setting.dtype)

    def query(self, rows: int) -> Tensor:
        """Strided, as the part of a projection that it is."""
        heads = self.setting.num_heads
        return self.randn(rows, heads + self.setting.num_kv_heads, self.setting.head_dim)[:, :heads]

    def forward(self, use: str, case: int) -> list[Run]:
        most = self.setting.most_runs
        runs = (1, most)[case] if case < 2 else self.rng.randint(1, most)
        return [self.run(use) for _ in range(runs)]

    def run(self, use: str) -> Run:
        context = self.context()
        if use == "all at once":
            use = self.rng.choice(USES[:-1])
        if use == "tree":
            return self.tree(context)
        if use == "prefill":
            length = context
        elif use == "prefill after a prefix":
            length = self.rng.randint(1, min(self.setting.prefill_rows, context))
        elif use == "decode":
            length = 1
        else:
            length = self.rng.randint(1, min(self.setting.few_rows, context))
        return QueryRun(length, context, self.blocks(context))

    def context(self) -> int:
        """Every second one at the edge of a page."""
        size, longest = self.setting.block_size, self.setting.longest
        if self.rng.random() < 0.5:
            return self.rng.randint(1, longest)
        edge = size * self.rng.randint(1, longest // size) + self.rng.choice((-1, 0, 1))
        return min(edge, longest)

    def blocks(self, context: int) -> list[int]:
        count = -(-context // self.setting.block_size) + self.rng.randint(0, 2)
        return self.rng.sample(range(DUMMY_BLOCK + 1, self.setting.num_blocks), count)

    def tree(self, context: int) -> TreeRun:
        """Branches that leave a chain of a few tokens after the context, at some depth."""
        rows, depth = self.rng.randint(1, self.setting.most_branches), self.rng.randint(1, 8)
        chain = self.rng.randint(0, self.setting.few_rows)
        limits = [context - 1 + self.rng.randint(0, chain) for _ in range(rows)]
        free = range(self.setting.block_size, self.setting.num_blocks * self.setting.block_size)
        scratch = self.rng.sample(free, rows * depth)
        return TreeRun(rows, context, self.blocks(context + chain), limits, scratch)


def check_attention(
    seed: int, cases: int, backend_factory: BackendFactory, setting: Setting = DEFAULT
) -> list[dict[str, Any]]:
    """For each use: ``use``, ``cases``, ``worst_error`` and ``unwritten_rows``."""
    made = Cases(seed, setting)
    backend = backend_factory(setting)
    exact = SdpaBackend(
        setting.num_heads, setting.num_kv_heads, setting.block_size, torch.float32, setting.device
    )
    results = []
    for use in USES:
        worst, unwritten = 0.0, 0
        for case in range(cases):
            runs = made.forward(use, case)
            query = made.query(sum(run.length for run in runs))
            _poison(query)
            out = backend.attend(query, made.cache, backend.plan(runs))
            unwritten += _unwritten_rows(query, out)
            worst = max(worst, _worst_error(exact, made.cache, runs, query, out))
        results.append(
            {"use": use, "cases": cases, "worst_error": worst, "unwritten_rows": unwritten}
        )
    return results


def _poison(query: Tensor) -> None:
    """What an allocator hands out next, for an output of this size, is likely this."""
    size = query.shape[0] * query.shape[1] * query.shape[2]
    query.new_full((size,), math.nan)


def _unwritten_rows(query: Tensor, out: Tensor) -> int:
    missing = abs(query.shape[0] - out.shape[0])
    return missing + int((out.isnan() | (out == 0).all(dim=1, keepdim=True)).any(dim=1).sum())


def _worst_error(
    exact: SdpaBackend, cache: LayerCache, runs: Sequence[Run], query: Tensor, out: Tensor
) -> float:
    if out.shape != (query.shape[0], query.shape[1] * query.shape[2]):
        return math.inf
    cache = LayerCache(cache.key.float(), cache.value.float())
    worst, row = 0.0, 0
    for run in runs:
        rows = slice(row, row + run.length)
        reference = exact.attend(query[rows].float(), cache, exact.plan([run]))
        error = float((out[rows].float() - reference).norm() / reference.norm())
        worst = max(worst, error if math.isfinite(error) else math.inf)
        row += run.length
    return worst


def print_table(results: Sequence[dict[str, Any]]) -> None:
    print(f"{'use':<24}{'cases':>6}{'worst relative error':>22}{'unwritten rows':>16}")
    for r in results:
        print(f"{r['use']:<24}{r['cases']:>6}{r['worst_error']:>22.5f}{r['unwritten_rows']:>16}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=DEFAULT.longest, help="context")
    args = parser.parse_args()
    setting = replace(DEFAULT, longest=args.longest)
    for exact in (True, False):
        print(f"\nFlashInfer, exact={exact}, {DEFAULT.dtype}, contexts up to {setting.longest}")
        print_table(check_attention(args.seed, args.cases, flashinfer(exact), setting))
    print("\nthe kernel of steps")
    print_table(check_attention(args.seed, args.cases, paged, setting))


if __name__ == "__main__":
    main()
