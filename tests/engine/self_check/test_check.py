"""A model that computes something else than plain torch is found before it serves."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ssd_engine.attention.cpu import CpuBackend
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.errors import SelfCheckError
from ssd_engine.execution import graphs, step_features
from ssd_engine.execution.graphs import GraphRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step, StepLayers
from ssd_engine.execution.step_attention import TritonAttention
from ssd_engine.execution.step_features import DeviceTap, StepFeatures, tap_kernel
from ssd_engine.forward.batch import Chunk, Drawing, Part, TreeRows
from ssd_engine.forward.step_inputs import HistoryInputs, StepShape
from ssd_engine.kernels.cpu.panels import PackedWeight
from ssd_engine.kernels.cpu.row_attention import AttentionRows
from ssd_engine.kernels.sampling import adjusting
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.kernels.sampling.reporting import Reports
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.decoder import Decoder
from ssd_engine.models.layer_ops import TorchOps
from ssd_engine.models.layers import EagerProducts
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.self_check import workload
from ssd_engine.self_check.check import StepCheck, check_model
from ssd_engine.self_check.expected import TOLERANCE, PlainTorch
from ssd_engine.self_check.features import FEATURES, FeatureCheck
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.layers import spread_out
from ssd_engine.self_check.workload import CheckRoom, round_parts, tree_parts
from tests.engine.execution.emulated_device import Graph, emulate
from tests.engine.models.test_finite_weights import OneOfTwo
from tests.random_models import SMALL, make_model
from tests.suite.scale import full_only

pytestmark = pytest.mark.usefixtures("quick_interpreter")

BLOCK, LAYERS = 16, 2
OPTIONS = RunnerOptions(
    directory=Path(),
    dtype="float32",
    device="cpu",
    block_size=BLOCK,
    max_model_len=512,
    max_num_seqs=3,
    max_forward_tokens=32,
    num_kv_blocks=160,
    step_rows=3,
)
DRAFT = {"step_rows": 3, "branches": 4, "max_tail": 8, "ranks": 3}
Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[str, Path] = {}

    def load(family: str = "qwen3", **options: Any) -> ModelRunner:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            with patch.dict(SMALL, num_attention_heads=4):
                make_model(family, made[family])
        directory = made[family]
        runner = ModelRunner(
            load_model_config(directory),
            replace(OPTIONS, directory=directory, **options),
            SingleRank(),
        )
        del runner.model.weights.layers[LAYERS:], runner.kv.layers[LAYERS:]
        return runner

    return load


def worst_of(findings: Findings) -> dict[str, float]:
    """The largest error of each operation."""
    worst: dict[str, float] = {}
    for place, error in findings.errors():
        worst[place.operation] = max(error, worst.get(place.operation, 0.0))
    return worst


def without_a_tile(x: Tensor) -> Tensor:
    """Of k: what a product leaves out that multiplies this."""
    left = x.clone()
    left[:, 16:24] = 0
    return left


def harm(patch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]) -> None:
    """``broken`` is given the method whose place it takes."""
    whole = getattr(owner, name)

    def method(*given: Any) -> Any:
        return broken(whole, *given)

    patch.setattr(owner, name, method)


# Forwards, as on a CPU or with --kernels torch


@pytest.mark.parametrize(
    "family", [full_only("llama-biases"), full_only("qwen2.5"), "olmo2", "qwen3"]
)
@pytest.mark.parametrize("dtype", [full_only("float32"), "bfloat16"])
def test_a_model_that_is_right_passes_and_leaves_the_cache_empty(
    load: Load, family: str, dtype: str
) -> None:
    runner = load(family, dtype=dtype, **DRAFT)
    worst = worst_of(check_model(runner))
    assert {"attention", "down product", "norm and head product"} <= worst.keys()
    assert 0 < max(worst.values()) < TOLERANCE / 2
    assert not runner.kv.pool.any()


def leave_out_a_tile_of_three_rows(
    whole: Any, self: Any, i: int, gated: Tensor, hidden: Tensor
) -> Any:
    return whole(self, i, without_a_tile(gated) if len(gated) == 3 else gated, hidden)


def leave_out_a_tile_of_logits(whole: Any, self: Any, hidden: Tensor) -> Any:
    return whole(self, without_a_tile(hidden))


def make_no_number(whole: Any, self: Any, i: int, hidden: Tensor) -> Tensor:
    projected: Tensor = whole(self, i, hidden)
    projected[-1, 7] = float("nan")
    return projected


def leave_out_keys(
    of_branches: bool,
    whole: Any,
    self: Any,
    query: Tensor,
    cache: LayerCache,
    plan: AttentionRows,
) -> Any:
    """The first ones."""
    value = cache.value.clone()
    value[:, :4] *= bool(len(plan.branches)) != of_branches
    return whole(self, query, LayerCache(cache.key, value), plan)


def scale_three_rows(whole: Any, self: Any, x: Tensor) -> Any:
    return whole(self, x) * (1 + 1e-2 * (len(x) == 3))


def turn_too_far(whole: Any, self: Any, positions: Tensor) -> Any:
    return whole(self, positions + 1)


def embed_nothing(whole: Any, self: Any, tokens: Tensor) -> Tensor:
    return torch.zeros(len(tokens), 64)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (
            EagerProducts,
            "multiply_down",
            leave_out_a_tile_of_three_rows,
            "layer 0, down product of a forward of 3 rows",
        ),
        (
            Decoder,
            "multiply_head",
            leave_out_a_tile_of_logits,
            "of qwen3.*: norm and head product of a prefill",
        ),
        (
            EagerProducts,
            "project",
            make_no_number,
            "norm and QKV product",
        ),  # what is no number is wrong
        (PackedWeight, "multiply", scale_three_rows, "of a forward of 3 rows"),
        (CpuBackend, "attend", partial(leave_out_keys, False), "layer 0, attention of a prefill"),
        (CpuBackend, "attend", partial(leave_out_keys, True), "layer 0, attention of a tree step"),
        (TorchOps, "places", turn_too_far, "layer 0, rotary embedding and KV write"),
        (Decoder, "embed", embed_nothing, "embedding .*--no-self-check"),
    ],
)
def test_a_forward_that_is_wrong_is_found(
    load: Load, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, words: str
) -> None:
    harm(monkeypatch, owner, name, broken)
    with pytest.raises(SelfCheckError, match=words):
        check_model(load(**DRAFT))


# Steps of few rows: interpreted kernels

VERIFY = StepShape(rows=8, runs=3, rows_per_run=3, max_positions=512, block_size=BLOCK)
TREE = StepShape(
    rows=8, runs=2, rows_per_run=5, max_positions=512, block_size=BLOCK, scratch=8, moves=8, path=4
)


class Graphs:
    """In place of captured graphs."""

    def num_replays(self, step: Step, side: int) -> int:
        return 1

    def replay(self, step: Step, side: int, turn: int, drawing: Drawing) -> None:
        step.run(drawing)


@pytest.fixture
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is interpreted takes its time; with a GPU in the machine none is."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    monkeypatch.setattr(workload, "CONTEXTS", (36, 17, 1))


def check_step(
    load: Load,
    shape: StepShape,
    replayed: Any = None,
    drawing: Drawing | None = None,
    ranks: int = 1,
) -> Findings:
    """``drawing``: the only way of drawing that is looked at; None: all of them. ``ranks``: of a
    step without trees."""
    runner = load(dtype="float32", kernels="torch", **(DRAFT if shape.scratch else {}))
    del runner.model.weights.layers[1:], runner.kv.layers[1:]
    vocab = runner.config.head_rows
    histories = Histories(OPTIONS.max_num_seqs, shape.rows, vocab, torch.device("cpu"))
    ranks = 3 if shape.scratch else ranks
    step = Step(runner.model, runner.kv, shape, ranks, histories=histories)
    if drawing is not None:
        step.drawings = [drawing]
    room = CheckRoom(runner.options, runner.num_blocks - 1, runner.config.vocab_size)
    runner.dummy_slot = (runner.num_blocks - 1) * BLOCK
    step.inputs.clear(runner.dummy_slot)
    parts: list[Part] = (
        tree_parts(room, shape.runs, 4, shape.rows, 3)
        if shape.scratch
        else round_parts(room, shape.runs, shape.rows_per_run, shape.rows)
    )
    findings = Findings(torch.float32, "model")
    with torch.inference_mode():
        StepCheck(runner, step, parts, findings).run(replayed or Graphs())
    findings.raise_if_wrong(SingleRank())
    return findings


@pytest.mark.usefixtures("short_contexts")
def test_a_draft_of_one_row_passes(load: Load) -> None:
    """Inside a target of one sequence: no row is drawn for rejection."""
    shape = replace(VERIFY, runs=1, rows_per_run=1, path=4)
    worst = worst_of(check_step(load, shape, drawing=Drawing.PLAIN, ranks=2))
    assert worst["drawing for rejection"] == 0.0


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [VERIFY, TREE], ids=["round", "tree"])
@pytest.mark.usefixtures("short_contexts")
def test_a_step_that_is_right_passes(load: Load, shape: StepShape) -> None:
    worst = worst_of(check_step(load, shape))
    assert {"attention", "captured graph", "drawing of tokens"} <= worst.keys()
    assert ("log probabilities" in worst) == (not shape.scratch)
    assert ("move of keys and values" in worst) == bool(shape.moves)


def leave_out_a_tile(whole: Any, self: Any, i: int) -> None:
    self.attended = without_a_tile(self.attended)
    whole(self, i)


def pad_wrongly(whole: Any, self: Any, i: int) -> None:
    """Such rows are computed by the same tiles as others, which may be real in the next step."""
    whole(self, i)
    self.hidden[-1] += 0.01


def forget_branches(whole: Any, self: Any, *given: Any) -> Any:
    self._inputs["run_depths"].zero_()
    return whole(self, *given)


def draw_from_others(whole: Any, self: Any, logits: Tensor, drawing: Drawing) -> None:
    whole(self, logits.roll(1, 1), drawing)


def forget_paths(whole: Any, self: Any, told: Any, added: Any) -> None:
    whole(self, [(row, place, draw._replace(path=())) for row, place, draw in told], added)


def report_others(whole: Any, self: Any, logits: Tensor, *drawn: Any) -> None:
    whole(self, logits / 2, *drawn)


class NoKernel:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: None


PRODUCT, TOKENS = "output product of a step .*--kernels torch", "drawing of tokens of a step"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("owner", "name", "broken", "shape", "drawing", "words"),
    [
        (StepLayers, "multiply_o", leave_out_a_tile, VERIFY, Drawing.PLAIN, PRODUCT),
        (StepLayers, "multiply_o", pad_wrongly, VERIFY, Drawing.PLAIN, PRODUCT),
        (
            TritonAttention,
            "__call__",
            forget_branches,
            TREE,
            Drawing.PLAIN,
            "layer 0, attention of a tree",
        ),
        (Step, "draw", draw_from_others, VERIFY, Drawing.FILTERED, TOKENS),
        (adjusting, "add_kernel", None, VERIFY, Drawing.ADJUSTED, TOKENS),
        (adjusting, "penalise_kernel", None, VERIFY, Drawing.ADJUSTED, TOKENS),
        (adjusting, "bias_kernel", None, VERIFY, Drawing.ADJUSTED, TOKENS),
        (
            HistoryInputs,
            "put",
            forget_paths,
            TREE,
            Drawing.ADJUSTED,
            "drawing of tokens of a tree step",
        ),
        (Reports, "make", report_others, VERIFY, Drawing.REPORTED, "log probabilities of a step"),
    ],
)
@pytest.mark.usefixtures("short_contexts")
def test_a_step_that_is_wrong_is_found(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    broken: Callable[..., Any] | None,
    shape: StepShape,
    drawing: Drawing,
    words: str,
) -> None:
    if broken is None:
        monkeypatch.setattr(owner, name, NoKernel())
    else:
        harm(monkeypatch, owner, name, broken)
    with pytest.raises(SelfCheckError, match=words):
        check_step(load, shape, drawing=drawing)


@pytest.mark.usefixtures("short_contexts")
def test_a_graph_that_computes_something_else(load: Load) -> None:
    class Other(Graphs):
        def num_replays(self, step: Step, side: int) -> int:
            return 2

        def replay(self, step: Step, side: int, turn: int, drawing: Drawing) -> None:
            super().replay(step, side, turn, drawing)
            step.layers.logits[1, 5] += 1e-3 * turn

    with pytest.raises(SelfCheckError, match=r"captured graph of a step .*--eager"):
        check_step(load, VERIFY, Other(), Drawing.PLAIN)


# Features are the residual stream


def check_features(load: Load, monkeypatch: pytest.MonkeyPatch) -> Findings:
    emulate(monkeypatch)
    monkeypatch.setattr(step_features, "PIECE", 64)
    runner = load("llama3-untied", kernels="torch")
    runner.dummy_slot = (runner.num_blocks - 1) * BLOCK
    shape = replace(VERIFY, rows=4, runs=2, rows_per_run=2)

    def make(boundaries: tuple[int, ...]) -> StepFeatures:
        return StepFeatures(runner.model, boundaries, shape.padded_rows, 2, overlap=False)

    monkeypatch.setattr(runner, "make_step_features", make)
    one = Step(runner.model, runner.kv, shape, 1, num_sides=2)
    one.drawings = [Drawing.PLAIN]
    monkeypatch.setattr(graphs, "capture_graph", lambda run, memory: (Graph(one, run), memory))
    rng, findings = random.Random(1), Findings(torch.float32, "model")
    parts = [
        Chunk([rng.randrange(512) for _ in range(2 - i)], 40, [*range(10 * i, 10 * i + 10)], 2 - i)
        for i in range(2)
    ]
    with torch.inference_mode():
        checked = FeatureCheck(runner, one, parts, findings)
        checked.run(GraphRunner([one], eager=False), "step", "--eager")
    assert one.layers.tap is None
    assert not runner.kv.pool[:, :20].any()
    findings.raise_if_wrong(SingleRank())
    return findings


def test_features_that_are_right_pass(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = check_features(load, monkeypatch)
    assert {place.operation for place, _ in findings.errors()} == {FEATURES}
    assert len(findings.errors()) == 4  # as often as a step is captured


def add_to_the_rest(whole: Any, self: Any, hidden: Tensor, place: int) -> None:
    whole(self, hidden + (1e-6 if place else 0.0), place)


class Shorter:
    """A kernel whose grid lacks a row."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return tap_kernel[grid[0], 2]


def change_values(patch: pytest.MonkeyPatch) -> None:
    harm(patch, DeviceTap, "_copy", add_to_the_rest)


def leave_out_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_features, "tap_kernel", Shorter())


@pytest.mark.sampled
@pytest.mark.parametrize("change", [change_values, leave_out_rows])
def test_features_that_are_wrong_are_found(
    change: Callable[[pytest.MonkeyPatch], None], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"residual stream of a step of 3 rows .*--eager"):
        check_features(load, monkeypatch)


# Ranks


def test_every_rank_learns_what_another_has_found() -> None:
    findings = Findings(torch.bfloat16, "model")
    findings.note(PLACE, torch.tensor(1.0))
    with pytest.raises(SelfCheckError, match="rank 1, layer 3, down product of a step of 8 rows"):
        findings.raise_if_wrong(OneOfTwo(0, 1))  # the other one has found something


# The tolerance


def test_a_dtype_that_is_too_narrow_is_named() -> None:
    findings = Findings(torch.float16, "model")
    findings.note(PLACE, torch.tensor(torch.nan))
    with pytest.raises(SelfCheckError, match=r"explains; float16 .*--dtype bfloat16"):
        findings.raise_if_wrong(SingleRank())


PLACE = CheckedOperation("step", 8, 3, "down product", "--kernels torch")


def error_of(taken: Tensor, x: Tensor, weight: Tensor) -> float:
    """Of a product of what was taken in place of x."""
    findings = Findings(x.dtype, "model")
    product = (taken.float() @ weight.float().T).to(x.dtype)
    findings.compare(PLACE, product, PlainTorch(x.dtype).product(x, weight))
    return findings.errors()[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [64, 1536, 14336])
def test_the_tolerance_knows_rounding_from_a_tile_that_is_missing(
    dtype: torch.dtype, k: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4, k, generator=generator).to(dtype)
    weight = (torch.randn(256, k, generator=generator) / k**0.5).to(dtype)
    assert error_of(x, x, weight) < TOLERANCE / 2
    assert error_of(without_a_tile(x), x, weight) > TOLERANCE


def test_outliers_do_not_hide_what_is_missing() -> None:
    """Trained models have entries of the hidden state that are a thousand times the others."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 2048, generator=generator)
    x[:, 99] *= 1000
    weight = torch.randn(256, 2048, generator=generator) / 45
    x, weight = x.bfloat16(), weight.bfloat16()
    shorter = x.clone()
    shorter[:, 64:128] = 0  # with the outlier among them
    assert error_of(x, x, weight) < TOLERANCE / 2
    assert error_of(shorter, x, weight) > TOLERANCE


# What is computed


def test_parts_have_room() -> None:
    rng = random.Random(1)
    for _ in range(200):
        size, tail, longest = rng.choice((4, 16, 64)), rng.choice((0, 8, 48)), rng.choice((65, 900))
        # A server has room for one sequence and its tree at least.
        blocks = -(-longest // size) - (-tail // size) + rng.randint(0, 200)
        options = replace(OPTIONS, block_size=size, max_tail=tail, max_model_len=longest)
        room, runs, rows = CheckRoom(options, blocks, 100), rng.randint(1, 9), rng.randint(1, 9)
        parts = round_parts(room, runs, rows, runs * rows)
        assert parts  # however small the cache is
        if tail:
            parts += tree_parts(room, runs, tail // 2, runs * (tail // 2 + 3), rng.choice((0, 3)))
        for part in parts:
            assert max(part.blocks) < blocks
            if isinstance(part, Chunk):
                assert part.start >= 0
                assert part.end <= longest
                assert len(part.blocks) == -(-part.end // size)  # no more than it uses
            if isinstance(part, TreeRows):
                assert max(part.positions) < longest
                assert max(part.scratch) < blocks * size
                assert min(part.scratch) >= (part.blocks[-1] + 1) * size


def test_rows_are_looked_at_from_the_first_to_the_last() -> None:
    assert spread_out(3, 8) == [0, 1, 2]
    assert spread_out(1000, 8)[::7] == [0, 999]
