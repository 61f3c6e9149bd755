"""FlashInfer against SDPA, and against itself bit for bit. Runs where there is a CUDA device."""

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssd_engine.attention.base import AttentionBackend, QueryRun, Run, TreeRun
from ssd_engine.attention.sdpa import SdpaBackend
from ssd_engine.attention.tree_mask import packed_masks
from ssd_engine.kvcache.cache import LayerCache
from tools.gpu.attention_check import (
    USES,
    Cases,
    Setting,
    check_attention,
    flashinfer,
    paged,
    sdpa,
)

BF16_ERROR = 1e-2
HAS_FLASHINFER = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None
SHORT = Setting(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    device=torch.device("cpu"),
    longest=100,
    most_runs=3,
    most_branches=9,
)
# Four query heads to a KV head, and seven: rows then lie across the tiles' edges.
SETTINGS = (Setting(), Setting(num_heads=28, num_kv_heads=4))


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not HAS_FLASHINFER, reason="needs a CUDA device and flashinfer")
    return pytest.mark.gpu(skip(test))


def assert_right(results: Sequence[dict[str, Any]]) -> None:
    assert [result["use"] for result in results] == list(USES)
    for result in results:
        assert result["unwritten_rows"] == 0, result
        assert result["worst_error"] <= BF16_ERROR, result


def test_the_check_passes_sdpa_in_bfloat16() -> None:
    assert_right(check_attention(0, 3, sdpa, SHORT))


class Unfinished(SdpaBackend):
    def attend(self, query: Tensor, cache: LayerCache, plan: Any) -> Tensor:
        out = super().attend(query, cache, plan)
        out[-1] = float("nan")
        return out


class Forgetful(SdpaBackend):
    """Sees all but the first page of what is longer."""

    def plan(self, runs: Sequence[Run]) -> Any:
        return super().plan([self._forget(run) for run in runs])

    def _forget(self, run: Run) -> Run:
        size = self.block_size
        if run.context <= run.length + size:
            return run
        if isinstance(run, TreeRun):
            run = replace(run, limits=[limit - size for limit in run.limits])
        return replace(run, context=run.context - size, blocks=run.blocks[1:])


@pytest.mark.parametrize(
    ("broken", "sees"), [(Unfinished, "unwritten_rows"), (Forgetful, "worst_error")]
)
def test_the_check_sees_what_is_wrong(broken: type[SdpaBackend], sees: str) -> None:
    def make(s: Setting) -> AttentionBackend:
        return broken(s.num_heads, s.num_kv_heads, s.block_size, s.dtype, s.device)

    results = {result["use"]: result for result in check_attention(0, 3, make, SHORT)}
    assert results["decode"][sees] > BF16_ERROR
    assert results["tree"][sees] > BF16_ERROR


@on_gpu
@pytest.mark.parametrize("backend", ["exact", "fast", "ours"])
@pytest.mark.parametrize("setting", SETTINGS, ids=["group4", "group7"])
def test_every_use_is_right(backend: str, setting: Setting) -> None:
    make = paged if backend == "ours" else flashinfer(exact=backend == "exact")
    assert_right(check_attention(1, 12, make, setting))


@on_gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=["group4", "group7"])
@pytest.mark.parametrize("use", ["prefill after a prefix", "decode", "verify"])
def test_a_run_gives_the_same_bits_alone_and_among_others(use: str, setting: Setting) -> None:
    made = Cases(2, setting)
    backend = flashinfer(exact=True)(setting)
    for case in range(8):
        runs = [*made.forward(use, case), *made.forward("all at once", case)]
        made.rng.shuffle(runs)
        query = made.query(sum(run.length for run in runs))
        together = backend.attend(query, made.cache, backend.plan(runs))
        row = 0
        for run in runs:
            rows = slice(row, row + run.length)
            row += run.length
            if isinstance(run, QueryRun):
                alone = backend.attend(query[rows], made.cache, backend.plan([run]))
                assert torch.equal(alone, together[rows]), run.length


def cuts(rng: random.Random, end: int, least: int, most: int, unit: int) -> list[int]:
    """Ends of chunks of ``least`` to ``most`` tokens, at multiples of ``unit`` but for the last."""
    ends: list[int] = []
    at = 0
    while end - at > most:
        first, last = -(-(at + least) // unit), min(at + most, end - least) // unit
        at = unit * rng.randint(first, last)
        ends.append(at)
    return [*ends, end]


def by_chunks(
    made: Cases, backend: AttentionBackend, query: Tensor, blocks: list[int], ends: Sequence[int]
) -> Tensor:
    """The last tokens of a sequence, one for each row of ``query``, cut at ``ends``."""
    first = ends[-1] - query.shape[0]
    parts = []
    for start, end in pairwise([first, *ends]):
        run = QueryRun(end - start, end, blocks)
        rows = query[start - first : end - first]
        parts.append(backend.attend(rows, made.cache, backend.plan([run])))
    return torch.cat(parts)


@on_gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=["group4", "group7"])
@pytest.mark.parametrize("length", [2999, 3008, 8208])
def test_our_kernel_gives_the_same_bits_however_a_prefill_is_cut(
    length: int, setting: Setting
) -> None:
    made = Cases(3, setting)
    backend = paged(setting)
    blocks, query = made.blocks(length), made.query(length)
    least, most = setting.few_rows + 1, setting.prefill_rows
    grid = [*range(most, length, most), length]
    whole = by_chunks(made, backend, query, blocks, grid)
    for unit in (16, 16, 48, 64, 1):
        ends = cuts(made.rng, length, least, most, unit)
        assert torch.equal(by_chunks(made, backend, query, blocks, ends), whole), ends


@on_gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=["group4", "group7"])
@pytest.mark.parametrize("start", [0, 250, 4090])  # before the edge of a split
def test_a_verification_gives_the_bits_of_decoding(start: int, setting: Setting) -> None:
    made = Cases(4, setting)
    backend = flashinfer(exact=True)(setting)
    end = start + 40
    blocks, query = made.blocks(end), made.query(40)
    plain = by_chunks(made, backend, query, blocks, range(start + 1, end + 1))
    for rows in (2, 3, 5, setting.few_rows):
        ends = [*range(start + rows, end, rows), end]
        assert torch.equal(by_chunks(made, backend, query, blocks, ends), plain), rows


# Masks of trees, as bits


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_run(rng: random.Random) -> TreeRun:
    rows, context = rng.randint(1, 30), rng.randint(1, 200)
    limits = [context - 1 + rng.randint(0, 7) for _ in range(rows)]
    scratch = list(range(1000, 1000 + rows * rng.randint(1, 6)))
    return TreeRun(rows, context, list(range(20)), limits, scratch)


def test_masks_are_those_of_the_runs() -> None:
    rng = random.Random(1)
    for _ in range(40):
        runs = [make_run(rng) for _ in range(rng.randint(1, 4))]
        expected = [np.packbits(run.visible(), axis=None, bitorder="little") for run in runs]
        packed, sizes = packed_masks(runs, DEVICE)
        assert sizes == list(map(len, expected))
        assert packed.dtype is torch.uint8
        assert packed.cpu().numpy().tolist() == np.concatenate(expected).tolist()
