"""A model that computes something else than plain torch is found before it serves."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.attention.cpu import CpuBackend
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.errors import SelfCheckError
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step, StepLayers
from ssd_engine.execution.step_attention import TritonAttention
from ssd_engine.forward.batch import Chunk, Drawing, Part, TreeRows
from ssd_engine.forward.step_inputs import HistoryInputs, StepShape
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
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.layers import spread_out
from ssd_engine.self_check.workload import CheckRoom, round_parts, tree_parts
from tests.random_models import make_model
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


# Forwards, as on a CPU or with --kernels torch


@pytest.mark.parametrize(
    "family", [full_only("llama-biases"), full_only("qwen2.5"), "olmo2", "qwen3"]
)
@pytest.mark.parametrize("dtype", [full_only("float32"), "bfloat16"])
def test_a_model_that_is_right_passes(load: Load, family: str, dtype: str) -> None:
    worst = worst_of(check_model(load(family, dtype=dtype, **DRAFT)))
    assert {"attention", "down product", "norm and head product"} <= worst.keys()
    assert 0 < max(worst.values()) < TOLERANCE / 2


def test_the_cache_is_left_empty(load: Load) -> None:
    runner = load(**DRAFT)
    check_model(runner)
    assert not runner.kv.pool.any()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_leaves_out_a_tile_at_one_row_count(
    load: Load, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    multiply = EagerProducts.multiply_down

    def broken(self: EagerProducts, i: int, gated: Tensor, hidden: Tensor) -> Tensor:
        return multiply(self, i, without_a_tile(gated) if len(gated) == 3 else gated, hidden)

    monkeypatch.setattr(EagerProducts, "multiply_down", broken)
    with pytest.raises(SelfCheckError, match="layer 0, down product of a forward of 3 rows"):
        check_model(load(dtype=dtype))


def test_logits_that_are_wrong(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = Decoder.multiply_head
    monkeypatch.setattr(
        Decoder, "multiply_head", lambda self, hidden: multiply(self, without_a_tile(hidden))
    )
    with pytest.raises(SelfCheckError, match=r"of qwen3.*: norm and head product of a prefill"):
        check_model(load())


def test_what_is_no_number_is_wrong(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    project = EagerProducts.project

    def broken(self: EagerProducts, i: int, hidden: Tensor) -> Tensor:
        projected = project(self, i, hidden)
        projected[-1, 7] = float("nan")
        return projected

    monkeypatch.setattr(EagerProducts, "project", broken)
    with pytest.raises(SelfCheckError, match="norm and QKV product"):
        check_model(load())


@pytest.mark.parametrize("use", ["prefill", "tree step"])
def test_attention_that_leaves_out_keys(
    load: Load, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    attend = CpuBackend.attend

    def broken(self: CpuBackend, query: Tensor, cache: LayerCache, plan: AttentionRows) -> Tensor:
        value = cache.value.clone()
        if bool(len(plan.branches)) == (use == "tree step"):
            value[:, :4] = 0
        return attend(self, query, LayerCache(cache.key, value), plan)

    monkeypatch.setattr(CpuBackend, "attend", broken)
    with pytest.raises(SelfCheckError, match=f"layer 0, attention of a {use}"):
        check_model(load(**DRAFT))


def test_keys_that_are_turned_wrongly(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    places = TorchOps.places
    monkeypatch.setattr(TorchOps, "places", lambda self, positions: places(self, positions + 1))
    with pytest.raises(SelfCheckError, match="layer 0, rotary embedding and KV write"):
        check_model(load())


def test_the_option_that_avoids_it_is_named(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "embed", lambda self, tokens: torch.zeros(len(tokens), 64))
    with pytest.raises(SelfCheckError, match=r"embedding .*--no-self-check"):
        check_model(load())


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
    monkeypatch.setattr(workload, "CONTEXTS", (70, 17, 1))


def check_step(
    load: Load,
    shape: StepShape,
    graphs: Any = None,
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
        StepCheck(runner, step, parts, findings).run(graphs or Graphs())
    findings.raise_if_wrong(SingleRank())
    return findings


@pytest.mark.usefixtures("short_contexts")
def test_a_draft_of_one_row_passes(load: Load) -> None:
    """Inside a target of one sequence: no row is drawn for rejection."""
    shape = replace(VERIFY, runs=1, rows_per_run=1, path=4)
    worst = worst_of(check_step(load, shape, drawing=Drawing.PLAIN, ranks=2))
    assert worst["drawing for rejection"] == 0.0


@pytest.mark.parametrize("shape", [VERIFY, TREE], ids=["round", "tree"])
@pytest.mark.usefixtures("short_contexts")
def test_a_step_that_is_right_passes(load: Load, shape: StepShape) -> None:
    worst = worst_of(check_step(load, shape))
    assert {"attention", "captured graph", "drawing of tokens"} <= worst.keys()
    assert ("log probabilities" in worst) == (not shape.scratch)
    assert ("move of keys and values" in worst) == bool(shape.moves)


@pytest.mark.usefixtures("short_contexts")
def test_a_product_of_a_step_that_leaves_out_a_tile(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = StepLayers.multiply_o

    def broken(self: StepLayers, i: int) -> None:
        self.attended = without_a_tile(self.attended)
        multiply(self, i)

    monkeypatch.setattr(StepLayers, "multiply_o", broken)
    with pytest.raises(SelfCheckError, match=r"output product of a step .*--kernels torch"):
        check_step(load, VERIFY, drawing=Drawing.PLAIN)


@pytest.mark.usefixtures("short_contexts")
def test_a_product_that_is_wrong_for_rows_that_pad_a_step(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed by the same tiles as others, which may be real in the next step."""
    multiply = StepLayers.multiply_o

    def broken(self: StepLayers, i: int) -> None:
        multiply(self, i)
        self.hidden[-1] += 0.01

    monkeypatch.setattr(StepLayers, "multiply_o", broken)
    with pytest.raises(SelfCheckError, match="output product of a step"):
        check_step(load, VERIFY, drawing=Drawing.PLAIN)


@pytest.mark.usefixtures("short_contexts")
def test_attention_of_a_tree_that_leaves_out_its_branches(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = TritonAttention.__call__

    def broken(self: TritonAttention, *given: Any) -> Tensor:
        self._inputs["run_depths"].zero_()
        return attend(self, *given)

    monkeypatch.setattr(TritonAttention, "__call__", broken)
    with pytest.raises(SelfCheckError, match="layer 0, attention of a tree step"):
        check_step(load, TREE, drawing=Drawing.PLAIN)


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


@pytest.mark.usefixtures("short_contexts")
def test_tokens_that_are_not_those_of_the_logits(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Step.draw
    monkeypatch.setattr(
        Step, "draw", lambda self, logits, drawing: draw(self, logits.roll(1, 1), drawing)
    )
    with pytest.raises(SelfCheckError, match="drawing of tokens of a step"):
        check_step(load, VERIFY, drawing=Drawing.FILTERED)


@pytest.mark.parametrize(
    "forgotten", [full_only("add_kernel"), "penalise_kernel", full_only("bias_kernel")]
)
@pytest.mark.usefixtures("short_contexts")
def test_tokens_that_are_drawn_before_penalties(
    load: Load, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    class Nothing:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *given, **options: None

    monkeypatch.setattr(adjusting, forgotten, Nothing())
    with pytest.raises(SelfCheckError, match="drawing of tokens of a step"):
        check_step(load, VERIFY, drawing=Drawing.ADJUSTED)


@pytest.mark.full
@pytest.mark.usefixtures("short_contexts")
def test_a_tree_whose_branches_forget_their_paths(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = HistoryInputs.put

    def forgetful(self: HistoryInputs, told: Any, added: Any) -> None:
        put(self, [(row, place, draw._replace(path=())) for row, place, draw in told], added)

    monkeypatch.setattr(HistoryInputs, "put", forgetful)
    with pytest.raises(SelfCheckError, match="drawing of tokens of a tree step"):
        check_step(load, TREE, drawing=Drawing.ADJUSTED)


@pytest.mark.full
@pytest.mark.usefixtures("short_contexts")
def test_log_probabilities_of_other_logits(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Reports.make
    monkeypatch.setattr(
        Reports, "make", lambda self, logits, *drawn: make(self, logits / 2, *drawn)
    )
    with pytest.raises(SelfCheckError, match="log probabilities of a step"):
        check_step(load, VERIFY, drawing=Drawing.REPORTED)


# Ranks


class Ranks:
    """One of two ranks, whose other one has found something at its first place."""

    rank, size = 0, 2

    def minimum(self, value: int) -> int:
        return min(value, 1)


def test_every_rank_learns_what_another_has_found() -> None:
    findings = Findings(torch.bfloat16, "model")
    place = CheckedOperation("step", 8, 3, "down product", "--kernels torch")
    findings.note(place, torch.tensor(1.0))
    with pytest.raises(SelfCheckError, match="rank 1, layer 3, down product of a step of 8 rows"):
        findings.raise_if_wrong(Ranks())  # type: ignore[arg-type]


# The tolerance


def test_a_dtype_that_is_too_narrow_is_named() -> None:
    findings = Findings(torch.float16, "model")
    findings.note(
        CheckedOperation("step", 8, 3, "down product", "--kernels torch"), torch.tensor(torch.nan)
    )
    with pytest.raises(SelfCheckError, match=r"explains; float16 .*--dtype bfloat16"):
        findings.raise_if_wrong(SingleRank())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [64, 1536, 14336])
def test_the_tolerance_knows_rounding_from_a_tile_that_is_missing(
    dtype: torch.dtype, k: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4, k, generator=generator).to(dtype)
    weight = (torch.randn(256, k, generator=generator) / k**0.5).to(dtype)
    expected = PlainTorch(dtype).product(x, weight)
    place = CheckedOperation("step", 4, 0, "product", "")

    def error(product: Tensor) -> float:
        findings = Findings(dtype, "model")
        findings.compare(place, product.to(dtype), expected)
        return findings.errors()[0][1]

    assert error(x.float() @ weight.float().T) < TOLERANCE / 2
    assert error(without_a_tile(x).float() @ weight.float().T) > TOLERANCE


def test_outliers_do_not_hide_what_is_missing() -> None:
    """Trained models have entries of the hidden state that are a thousand times the others."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 2048, generator=generator)
    x[:, 99] *= 1000
    weight = torch.randn(256, 2048, generator=generator) / 45
    x, weight = x.bfloat16(), weight.bfloat16()
    expected = PlainTorch(torch.bfloat16).product(x, weight)
    right = (x.float() @ weight.float().T).bfloat16()
    findings = Findings(torch.bfloat16, "model")
    place = CheckedOperation("step", 4, 0, "product", "")
    findings.compare(place, right, expected)
    shorter = x.clone()
    shorter[:, 64:128] = 0  # with the outlier among them
    findings.compare(place, (shorter.float() @ weight.float().T).bfloat16(), expected)
    (_, of_right), (_, of_wrong) = findings.errors()
    assert of_right < TOLERANCE / 2
    assert of_wrong > TOLERANCE


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
    chosen = spread_out(1000, 8)
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 999, 8)
