"""Whether every kernel computes what plain torch does: dense weights, real shapes, parts of a GPU.

Models of two layers in the shapes of published ones, on our CUDA sources and on Triton's kernels
alone, in processes that may use all multiprocessors of the device or a part of them (MPS). Each
operation of each layer is held against float32 torch on the same input, and so is each whole layer;
a row's bits are held against those of the same row at other places and among other rows.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_client.local.mps import share_variables
from ssd_engine.checkpoints.families.family import QKNorm
from ssd_engine.checkpoints.model_config import ModelConfig, parse_model_config
from ssd_engine.errors import SelfCheckError
from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.kernels.kernel_set import KernelSet, choose_kernels
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import make_product
from ssd_engine.models.decoder import DecoderWeights, LayerWeights
from ssd_engine.models.tensor_parallel import SingleRank, TensorParallel
from ssd_engine.self_check.check import check_model
from ssd_engine.self_check.expected import TOLERANCE, PlainTorch
from ssd_engine.self_check.layers import MOST_RUNS, Rows
from ssd_engine.self_check.workload import CheckRoom, fill_context, round_parts
from tools.gpu.report import FAILED
from tools.gpu.report import Rows as Table
from tools.gpu.serving import mps
from tools.gpu.shapes import SHAPES

PATHS = {"CUDA sources": "auto", "Triton": "triton"}
# Percent of an H200's 132 multiprocessors, and what a process gets for it: MPS deals out pairs.
PARTS = {100: 132, 87: 114, 70: 92, 50: 66, 31: 40}
AT_ONCE = 15  # processes: compiling takes most of their time
LAYERS, SEED, EPS = 2, 0, 1e-6
ROW_COUNTS = (1, 8, 16, 24, 32, 48, 64, 128, 192, 256)
LAYER_TOLERANCE = 0.03  # of what a whole layer adds: some ten roundings, one after the other
SIZES: dict[str, dict[str, Any]] = {
    "target": {"max_num_seqs": 11, "step_rows": 6, "exact": True},
    "draft": {
        "max_num_seqs": 2,
        "step_rows": 5,
        "branches": 12,
        "max_tail": 72,
        "ranks": 17,
        "exact": False,
    },
}


def check(shapes: Sequence[str], percents: Sequence[int]) -> Table:
    """A process for each shape and part of the device, several at a time."""
    tasks = [(shape, percent) for percent in percents for shape in shapes]
    with mps(), ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda task: _in_process(*task), tasks))
    return [row for rows in found for row in rows]


def _in_process(shape: str, percent: int) -> Table:
    environment = {**os.environ, **share_variables(percent)}
    command = [sys.executable, "-m", "tools.gpu.check", shape]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [{"shape": shape, "multiprocessors": PARTS[percent], FAILED: last[0]}]
    rows: Table = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        if row["multiprocessors"] != PARTS[percent]:
            row[FAILED] = f"{PARTS[percent]} multiprocessors were asked for: this is for an H200"
    return rows


@dataclass
class Tally:
    """What was found for one shape on one path."""

    checked: int = 0
    worst: float = 0.0  # in roundings
    worst_layer: float = 0.0  # relative
    rows_compared: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failures.append(what)


def check_shape(name: str) -> Table:
    """In this process, on whatever part of the device it has."""
    config = parse_model_config({**SHAPES[name], "num_hidden_layers": LAYERS})
    device = torch.device("cuda")
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    rows: Table = []
    for path, kernels in PATHS.items():
        tally = Tally()
        for steady in (True, False):
            _check_products(config, choose_kernels(kernels, device, steady), tally)
        for role, sizes in SIZES.items():
            _check_model(config, kernels, role, sizes, tally)
        rows.append(
            {
                "shape": name,
                "path": path,
                "multiprocessors": processors,
                "operations": tally.checked,
                "worst, roundings": tally.worst,
                "worst layer": tally.worst_layer,
                "rows with equal bits": tally.rows_compared,
                **({FAILED: "; ".join(tally.failures)} if tally.failures else {}),
            }
        )
    return rows


# Models


def _check_model(
    config: ModelConfig, kernels: str, role: str, sizes: dict[str, Any], tally: Tally
) -> None:
    options = RunnerOptions(
        directory=Path(),
        dtype="bfloat16",
        device="cuda",
        block_size=16,
        max_model_len=2048,
        max_forward_tokens=256,
        num_kv_blocks=512,
        kernels=kernels,
        **sizes,
    )
    runner = ModelRunner(config, options, SingleRank(), random_weights)
    try:
        findings = check_model(runner)
    except SelfCheckError as error:
        tally.fail(f"{role}: {error}")
        return
    errors = [error for _, error in findings.errors()]
    tally.checked += len(errors)
    tally.worst = max(tally.worst, *errors)
    if runner.steps is None or role != "target":
        return
    largest = runner.steps.steps[-1]
    with torch.inference_mode():
        _check_whole_layers(runner, largest, tally)
        _check_row_bits(runner, tally)


def random_weights(
    config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Dense: no weight is zero, so that nothing that is left out goes unnoticed."""
    generator = torch.Generator(device).manual_seed(SEED)

    def matrix(*sizes: int) -> Tensor:
        made = torch.empty(sizes, dtype=dtype, device=device)
        return made.normal_(std=sizes[-1] ** -0.5, generator=generator)

    def around(centre: float, *sizes: int) -> Tensor:
        made = torch.empty(sizes, device=device).normal_(centre, 0.2, generator=generator)
        return made.to(dtype)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    width = (heads + 2 * kv_heads) * dim

    traits = config.traits
    norm, after = traits.qk_norm, traits.norms_outputs

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=None if after else around(1, hidden),
            qkv=matrix(width, hidden),
            qkv_bias=around(0, width) if traits.qkv_bias else None,
            qk_norm=around(1, heads + kv_heads, dim) if norm is QKNorm.HEAD else None,
            projection_norm=(
                around(1, (heads + kv_heads) * dim) if norm is QKNorm.PROJECTION else None
            ),
            o=matrix(hidden, heads * dim),
            o_bias=around(0, hidden) if traits.o_bias else None,
            attention_output_norm=around(1, hidden) if after else None,
            mlp_norm=None if after else around(1, hidden),
            gate_up=matrix(2 * inner, hidden),
            gate_up_bias=around(0, 2 * inner) if traits.mlp_bias else None,
            down=matrix(hidden, inner),
            down_bias=around(0, hidden) if traits.mlp_bias else None,
            mlp_output_norm=around(1, hidden) if after else None,
        )

    embedding = matrix(config.head_rows, hidden) * hidden**0.5
    head = embedding if config.tie_word_embeddings else matrix(config.head_rows, hidden)
    layers = [layer() for _ in range(config.num_layers)]
    return DecoderWeights(embedding, layers, around(1, hidden), head)


def _check_whole_layers(runner: ModelRunner, step: Step, tally: Tally) -> None:
    """From the hidden states before a layer to those after it, in float32."""
    room = CheckRoom(runner.options, runner.num_blocks, runner.config.vocab_size)
    runs = min(step.shape.runs, MOST_RUNS)
    parts = round_parts(room, runs, step.shape.rows_per_run, step.shape.rows)
    fill_context(runner.kv, parts)
    _fill_inputs(runner, step, parts)
    step.inputs.copy()
    layers = step.layers
    rows = Rows.of(parts, runner.options.block_size, runner.device)
    count = len(rows.tokens)
    layers.embed()
    for i in range(LAYERS):
        before = layers.hidden[:count].clone()
        layers.compute(range(i, i + 1))
        expected = _plain_layer(runner, i, before, rows)
        added = (expected - before.float()).norm(dim=1)
        error = (layers.hidden[:count].float() - expected).norm(dim=1) / added
        worst = float(error.max())
        tally.worst_layer = max(tally.worst_layer, worst)
        tally.checked += 1
        if not worst <= LAYER_TOLERANCE:
            tally.fail(f"layer {i} as a whole is off by {worst:.3g}")


def _plain_layer(runner: ModelRunner, i: int, before: Tensor, rows: Rows) -> Tensor:
    model, plain = runner.model, PlainTorch(torch.bfloat16)
    config, layer, kept = model.config, model.weights.layers[i], runner.kv.layers[i]
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, config.head_dim
    x = _normed(plain, before, layer.attention_norm, config.rms_norm_eps)
    qkv = plain.product(x, layer.qkv, layer.qkv_bias).value.view(len(before), -1, dim)
    query, norm = qkv[:, :heads], None if layer.qk_norm is None else layer.qk_norm[:heads]
    if layer.projection_norm is not None:
        whole = layer.projection_norm[: heads * dim]
        query = plain.normalised(query.flatten(1), whole, config.qk_norm_eps).view_as(query)
    query = plain.rotated(query, norm, config.qk_norm_eps, *model.rope.at(rows.positions)).value
    keys, values = (t.view(-1, kv_heads, dim) for t in (kept.key, kept.value))
    attended = torch.zeros(len(before), heads * dim, device=before.device)
    for seen in rows.seen:
        pages = keys[seen.slots], values[seen.slots]
        attended[seen.rows] = plain.attention(query[seen.rows], *pages, seen.visible).value
    out = plain.product(attended, layer.o, layer.o_bias).value
    middle = before.float() + _normed(plain, out, layer.attention_output_norm, config.rms_norm_eps)
    x = _normed(plain, middle, layer.mlp_norm, config.rms_norm_eps)
    gated = plain.gated(plain.product(x, layer.gate_up, layer.gate_up_bias)).value
    out = plain.product(gated, layer.down, layer.down_bias).value
    return middle + _normed(plain, out, layer.mlp_output_norm, config.rms_norm_eps)


def _normed(plain: PlainTorch, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return x if norm is None else plain.normalised(x, norm, eps)


def _fill_inputs(runner: ModelRunner, step: Step, parts: Sequence[Part]) -> list[int]:
    draws = [None] * sum(part.num_logits for part in parts)
    runs, moves = step_runs(parts, draws, runner.options.block_size)
    step.use(0)
    return step.inputs.fill(runs, runner.dummy_slot, moves)


# Bits


def _check_row_bits(runner: ModelRunner, tally: Tally) -> None:
    """Rows of one sequence: verified alone, verified among others, decoded one by one; each by the
    smallest step that there is for it."""
    most, length, context = runner.options.max_num_seqs, runner.options.step_rows, 330
    room = runner.num_blocks // most
    blocks = [list(range(i * room, (i + 1) * room)) for i in range(most)]
    mine = Chunk(list(range(5, 5 + length)), context, blocks[0], length)
    others = [
        Chunk([9 + i] * (length - i % 3), 127 + 31 * i, own, length - i % 3)
        for i, own in enumerate(blocks[1:])
    ]
    fill_context(runner.kv, [mine, *others])
    alone = _logits(runner, [mine])
    one_by_one = [
        _logits(runner, [Chunk(mine.tokens[i : i + 1], context + i, blocks[0], 1)])
        for i in range(length)
    ]
    found = {"one by one": torch.cat(one_by_one)}
    for count in (3, most - 1):
        found[f"among {count} others"] = _logits(runner, [*others[:count], mine])[-length:]
    for name, got in found.items():
        tally.rows_compared += length
        if not torch.equal(got, alone):
            tally.fail(f"rows {name} have other bits than alone")


def _logits(runner: ModelRunner, parts: Sequence[Part]) -> Tensor:
    steps = runner.steps
    step = None if steps is None else steps.step_for(parts)
    if steps is None or step is None:
        raise RuntimeError("there is no step for these rows")
    begins = _fill_inputs(runner, step, parts)
    steps.replay(step, 0)
    torch.cuda.synchronize()
    rows = [b + i for b, part in zip(begins, parts, strict=True) for i in range(len(part.tokens))]
    return step.layers.logits[rows].clone()


# Products


def _product_shapes(config: ModelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * dim
    yield "QKV", {"n": width, "k": hidden, "norm": True, "bias": config.traits.qkv_bias}
    yield "output", {"n": hidden, "k": config.num_heads * dim, "residual": True}
    yield "gate-up", {"n": 2 * inner, "k": hidden, "norm": True, "gated": True}
    yield "down", {"n": hidden, "k": inner, "residual": True}
    yield "head", {"n": config.head_rows, "k": hidden, "norm": True, "wide": True}


def _check_products(config: ModelConfig, kernels: KernelSet, tally: Tally) -> None:
    for name, about in _product_shapes(config):
        n, k = about["n"], about["k"]
        generator = torch.Generator("cuda").manual_seed(n + k)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device="cuda").bfloat16()  # noqa: B023

        weight, x = randn(n, k) / k**0.5, randn(max(ROW_COUNTS), k)
        norm = 1 + 0.2 * randn(k) if about.get("norm") else None
        bias = randn(n) if about.get("bias") else None
        before = randn(max(ROW_COUNTS), n // 2 if about.get("gated") else n)
        operands = Operands(weight, x, before, norm, bias)
        firsts = [
            _check_product(name, ProductShape(rows=rows, **about), operands, kernels, tally)
            for rows in ROW_COUNTS
        ]
        if kernels.steady:
            tally.rows_compared += len(firsts)
            if not all(torch.equal(first, firsts[0]) for first in firsts):
                tally.fail(f"{name} product: a row has other bits at other row counts")


@dataclass(frozen=True)
class Operands:
    weight: Tensor
    x: Tensor
    before: Tensor  # what a residual is added to
    norm: Tensor | None
    bias: Tensor | None


def _check_product(
    name: str, shape: ProductShape, operands: Operands, kernels: KernelSet, tally: Tally
) -> Tensor:
    """Returns its first row."""
    weight, norm, bias = operands.weight, operands.norm, operands.bias
    plain, padded, rows = PlainTorch(torch.bfloat16), shape.octets * 8, shape.rows
    product = make_product(shape, torch.bfloat16, weight.device, kernels)
    mine, before = operands.x[:padded], operands.before[:padded]

    def run(turn: int) -> Tensor:
        """Every row so many places further down."""
        out = before.roll(turn, 0).to(torch.float32 if shape.wide else torch.bfloat16)
        product(weight, mine.roll(turn, 0), out, norm, EPS, bias)
        return out[:rows]

    got = run(0)
    exact = plain.normalised(mine[:rows], norm, EPS) if norm is not None else mine[:rows]
    expected = plain.product(exact, weight, bias)
    if shape.gated:
        expected = plain.gated(expected)
    if shape.residual:
        expected = expected.plus(before[:rows].float())
    ratio = (got.float() - expected.value).abs() / (plain.unit * expected.spread)
    error = float(ratio.nan_to_num(nan=float("inf")).max())
    tally.checked += 1
    tally.worst = max(tally.worst, error)
    if not error <= TOLERANCE:
        tally.fail(f"{name} product, {rows} rows: off by {error:.3g} roundings")
    if rows == padded:
        tally.rows_compared += rows
        if not torch.equal(run(3).roll(-3, 0), got):
            tally.fail(f"{name} product, {rows} rows: other bits at another place")
    return got[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="One shape, in this process.")
    parser.add_argument("shape", choices=SHAPES)
    print(json.dumps(check_shape(parser.parse_args().shape)))


if __name__ == "__main__":
    main()
