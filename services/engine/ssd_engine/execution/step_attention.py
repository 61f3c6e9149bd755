"""Attention of a step's rows, from their projection to what the output projection takes.

Two ways: one kernel for all of it, where blocks of a device can work in clusters, and three that
need nothing but Triton.
"""

import math
from typing import Protocol

import torch
import triton
from torch import Tensor

from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kernels.driver import SOURCES, Kernel, compiled_kernel, tensor_map
from ssd_engine.kernels.elementwise import overlapping
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.paged_attention import (
    Division,
    merge_parts_kernel,
    paged_attention_kernel,
    rotate_and_write_kernel,
)
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.decoder import Decoder, LayerWeights

PARTS_AT_ONCE = 8
MANY_ROWS = 128  # rows of an attention program, from which on more warps pay
# From here on attention that begins early is in the way of what it waits for: measured, a layer
# takes 15 to 90 us longer.
CROWDED_ROWS = 64

SOURCE = SOURCES / "few_rows_attention.cu"
MOST_CLUSTER = 8  # blocks; more would not find room on every device
TILE = 64  # keys
DIMENSIONS = (64, 128)
MOST_ROWS = 128
WARPGROUP_ROWS = 64
ASKERS = 4  # warps, one for each page of a tile
PANEL = 64  # dimensions
STAGES = 3  # tiles in shared memory: one is computed, the others are on their way


class StepAttention(Protocol):
    def __call__(self, projected: Tensor, layer: LayerWeights, cache: LayerCache) -> Tensor:
        """[rows, heads * dim]; the new keys and values are in the cache then."""


def make_attention(
    model: Decoder, inputs: StepInputs, kernels: KernelSet, largest: StepShape
) -> StepAttention:
    """``largest``: of the shapes that must give a row the same bits. Which kernel they take, and
    how it divides keys, follows from that one."""
    cluster = _cluster_of(model, largest, kernels)
    if not cluster:
        return TritonAttention(model, inputs, kernels.overlap)
    return ClusterAttention(
        model, inputs, ClusterShape(model, inputs.shape, cluster, largest.rows_per_run)
    )


def _cluster_of(model: Decoder, largest: StepShape, kernels: KernelSet) -> int:
    """Blocks that serve a KV head of a run; 0 where that kernel is not to be had."""
    if not kernels.hopper:
        return 0
    cluster = largest_cluster(model, largest, kernels.processors)
    while cluster:
        shape = ClusterShape(model, largest, cluster)
        if not shape.fits(kernels.shared_memory):
            return 0
        if has_room(model, largest, shape):
            return cluster
        cluster //= 2
    return 0


def largest_cluster(model: Decoder, shape: StepShape, processors: int) -> int:
    """The largest cluster that leaves room for those of all runs at once."""
    cluster = MOST_CLUSTER
    while cluster > 1 and cluster * model.num_kv_heads * shape.runs > processors:
        cluster //= 2
    return cluster


def has_room(model: Decoder, step: StepShape, shape: "ClusterShape") -> bool:
    """Whether the device has room for a cluster at all."""
    if shape.cluster == 1:
        return True
    grid = (model.num_kv_heads * shape.cluster, step.runs)
    kernel = shape.compiled()
    return kernel.most_clusters(grid, shape.cluster) > 0


class ClusterShape:
    """The sizes that the kernel of one cluster shape is compiled for."""

    def __init__(
        self, model: Decoder, shape: StepShape, cluster: int, most_rows: int | None = None
    ) -> None:
        """``cluster``: blocks. ``most_rows``: of a run, in the shape by which keys are divided."""
        self._dtype, self.cluster = model.weights.norm.dtype, cluster
        group = model.num_heads // model.num_kv_heads
        self.dim, self._page = model.config.head_dim, shape.block_size
        self.rows = -(-shape.rows_per_run * group // 16) * 16
        self.row_groups = -(-self.rows // WARPGROUP_ROWS)
        most_groups = -(-(most_rows or shape.rows_per_run) * group // WARPGROUP_ROWS)
        self.key_groups = 1 if most_groups * self.dim > 128 else 2
        self.stages = STAGES
        self._table, self._scratch = shape.table_width, shape.scratch
        self.defines = {
            "HEADS": model.num_heads,
            "KV_HEADS": model.num_kv_heads,
            "DIM": self.dim,
            "PAGE": self._page,
            "ROWS": self.rows,
            "KEY_GROUPS": self.key_groups,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "TABLE": self._table,
            "SCRATCH": self._scratch,
            "TREE": int(self._scratch > 0),
            "NORM": int(model.weights.layers[0].qk_norm is not None),
        }

    def fits(self, most_shared: int) -> bool:
        return (
            self._dtype is torch.bfloat16
            and self.dim in DIMENSIONS
            and self._page <= TILE
            and TILE % self._page == 0
            and TILE // self._page <= ASKERS
            and self.rows <= MOST_ROWS
            and self.shared <= most_shared
        )

    def compiled(self) -> Kernel:
        return compiled_kernel(SOURCE, self.defines, self.warps * 32, self.shared)

    @property
    def warps(self) -> int:
        return 4 * self.row_groups * self.key_groups + ASKERS

    @property
    def shared(self) -> int:
        """Bytes: queries; tiles of keys and values, whose room is then for sums; sums to be sent,
        and received; peaks, barriers."""
        size = self.row_groups * WARPGROUP_ROWS * self.dim * 2 + self.stages * TILE * self.dim * 4
        sums = self.rows * (self.dim * 2 + 16)
        return size + 2 * sums + self.key_groups * self.rows * 8 + (2 * self.stages + 2) * 8


class ClusterAttention:
    def __init__(self, model: Decoder, inputs: StepInputs, shape: ClusterShape) -> None:
        self._model, self._inputs = model, inputs
        device = model.weights.norm.device
        self._kernel = shape.compiled()
        self._cluster, self._box = shape.cluster, (inputs.shape.block_size, 1, PANEL)
        self._grid = (model.num_kv_heads * shape.cluster, inputs.shape.runs)
        width = model.num_heads * shape.dim
        self._out = torch.zeros(
            inputs.shape.padded_rows, width, dtype=torch.bfloat16, device=device
        )
        rows = ("positions", "slots", "limits", "branches")
        runs = ("run_begin", "run_rows", "run_end", "run_new", "run_source")
        more = ("run_branches", "run_depths", "tables", "scratch")
        self._told = [inputs[name] for name in (*rows, *runs, *more)]
        self._scale = math.log2(math.e) / math.sqrt(shape.dim)

    def __call__(self, projected: Tensor, layer: LayerWeights, cache: LayerCache) -> Tensor:
        rope, eps = self._model.rope, self._model.config.qk_norm_eps
        tensors = (projected, layer.qk_norm, rope.cos, rope.sin, cache.key, cache.value, self._out)
        maps = (tensor_map(kept.flatten(0, 1), self._box) for kept in (cache.key, cache.value))
        arguments = (*tensors, *self._told, self._scale, eps, *maps)
        self._kernel.launch(self._grid, arguments, self._cluster)
        return self._out


class TritonAttention:
    def __init__(self, model: Decoder, inputs: StepInputs, overlap: bool) -> None:
        self._model, self._inputs, self._overlap = model, inputs, overlap
        shape = inputs.shape
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.config.head_dim
        device, dtype = model.weights.norm.device, model.weights.norm.dtype
        self._group_rows = max(16, triton.next_power_of_2(shape.rows_per_run * (heads // kv_heads)))
        self._division = Division.of(shape.max_positions, shape.scratch)
        self._parts = self._division.most_parts
        padded, pairs = shape.padded_rows, shape.runs * kv_heads * self._parts * self._group_rows
        self._query = torch.zeros(padded, heads * dim, dtype=dtype, device=device)
        self._out = torch.zeros(padded, heads * dim, dtype=dtype, device=device)
        self._partial = torch.zeros(pairs * dim, dtype=torch.float32, device=device)
        self._peaks = torch.zeros(pairs * 2, dtype=torch.float32, device=device)

    def __call__(self, projected: Tensor, layer: LayerWeights, cache: LayerCache) -> Tensor:
        self._rotate_and_write(projected, layer, cache)
        self._attend(cache)
        return self._out

    def _rotate_and_write(self, projected: Tensor, layer: LayerWeights, cache: LayerCache) -> None:
        model, inputs = self._model, self._inputs
        heads, kv_heads = model.num_heads, model.num_kv_heads
        rotate_and_write_kernel[(inputs.shape.rows, heads + 2 * kv_heads)](
            projected,
            layer.qk_norm if layer.qk_norm is not None else projected,
            model.rope.cos,
            model.rope.sin,
            inputs["positions"],
            inputs["slots"],
            self._query,
            cache.key,
            cache.value,
            model.config.qk_norm_eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=model.config.head_dim,
            NORM=layer.qk_norm is not None,
            num_warps=1,
            **overlapping(self._overlap),
        )

    def _attend(self, cache: LayerCache) -> None:
        model, inputs, shape = self._model, self._inputs, self._inputs.shape
        kv_heads, dim = model.num_kv_heads, model.config.head_dim
        about = {
            "HEADS": model.num_heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "ROWS": self._group_rows,
            **self._division.constants(),
            "TREE": bool(shape.scratch),
        }
        runs = [inputs[name] for name in ("run_begin", "run_rows", "run_end")]
        trees = [inputs[name] for name in ("run_branches", "run_depths")]
        paged_attention_kernel[(self._parts, kv_heads, shape.runs)](
            self._query,
            cache.key,
            cache.value,
            self._out,
            *runs,
            inputs["limits"],
            inputs["tables"],
            inputs["branches"],
            *trees,
            inputs["scratch"],
            self._partial,
            self._peaks,
            math.log2(math.e) / math.sqrt(dim),
            shape.table_width,
            shape.scratch,
            BLOCK=shape.block_size,
            num_warps=8 if self._group_rows >= MANY_ROWS else 4,
            num_stages=3,
            **about,
            **overlapping(self._overlap and self._group_rows < CROWDED_ROWS),
        )
        lanes = shape.rows_per_run * (model.num_heads // kv_heads)
        merge_parts_kernel[(lanes, kv_heads, shape.runs)](
            self._partial,
            self._peaks,
            self._out,
            *runs,
            *trees,
            AT_ONCE=PARTS_AT_ONCE,
            num_warps=1,
            **about,
            **overlapping(self._overlap),
        )
