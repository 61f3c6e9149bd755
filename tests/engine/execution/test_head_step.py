"""A head's steps of few rows compute what its plain forward does: interpreted kernels."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import load_head_config
from ssd_engine.execution import head_step, step
from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.head_step import HeadStepLayers, ToldStates
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, KVCopy, Part, TreeRows, logit_rows
from ssd_engine.forward.step_inputs import StepShape
from tests.harness import BLOCK
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model
from tests.scale import full_only

pytestmark = pytest.mark.usefixtures("quick_interpreter")

FEW = StepShape(rows=8, runs=3, rows_per_run=4, max_positions=160, block_size=BLOCK)
TREE = StepShape(
    rows=8,
    runs=2,
    rows_per_run=4,
    max_positions=160,
    block_size=BLOCK,
    scratch=8,
    moves=4,
    path=3,
)
NUM_BLOCKS = 32
DUMMY = (NUM_BLOCKS - 1) * BLOCK
BLOCKS = [[3, 1, 4], [9, 7, 5]]
LENGTHS = (20, 17)  # rows that are computed before
SCRATCH = 12 * BLOCK  # slots from here on are branches'


@pytest.fixture(scope="module", params=["llama", "qwen3-all-norms", full_only("llama-two-layers")])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadRunner:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_model("llama3-untied", folder / "target")
    make_head(KINDS[request.param], folder / "head")
    options = RunnerOptions(
        directory=folder / "head",
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=160,
        max_num_seqs=4,
        max_forward_tokens=64,
        num_kv_blocks=NUM_BLOCKS,
        kernels="torch",
    )
    config = load_head_config(folder / "head")
    checkpoint = open_head(folder / "head", config, folder / "target")
    runner = HeadRunner(config, checkpoint, options, SHAPE["vocab_size"])
    chunks = [Chunk(tokens(length, i), 0, BLOCKS[i], 1) for i, length in enumerate(LENGTHS)]
    runner.step_with_features(chunks, [], features(LENGTHS, 1)).result()
    return runner


@pytest.fixture(autouse=True)
def a_layer_in_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "LEADING_LAYERS", 1)
    monkeypatch.setattr(head_step, "PIECE", 64)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(count)]


def features(counts: tuple[int, ...], seed: int) -> GivenFeatures:
    torch.manual_seed(seed)
    return GivenFeatures(counts, torch.randn(sum(counts), 3 * SHAPE["hidden_size"]))


def branches(level: int, limits: tuple[int, ...], seed: int = 5) -> TreeRows:
    """One depth of as many branches of the first sequence."""
    count = len(limits)
    scratch = list(range(SCRATCH, SCRATCH + count * (level + 1)))
    positions = [limit + 1 + level for limit in limits]
    context = min(limits) + 1
    about = (positions, limits, scratch[-count:], context, BLOCKS[0], scratch)
    return TreeRows(tokens(count, seed + level), *about)


def compare(
    runner: HeadRunner, shape: StepShape, parts: list[Part], given: GivenFeatures | None = None
) -> None:
    """Logits and states of both, from the same cache; what the plain forward leaves stays."""
    pool, states = runner.kv.pool, runner._states.rows
    before = pool.clone(), states.clone()
    got, left = by_step(runner, shape, parts, given)
    pool.copy_(before[0])
    states.copy_(before[1])
    none = GivenFeatures([0] * sum(not isinstance(part, KVCopy) for part in parts), torch.empty(0))
    expected = runner.step_with_features(parts, [], given or none).result().logits
    drafted = expected.isfinite()
    assert torch.equal(drafted, got.isfinite())
    torch.testing.assert_close(got[drafted], expected[drafted], atol=5e-4, rtol=5e-4)
    keep = torch.ones(len(states), dtype=torch.bool)
    keep[DUMMY] = False  # what pads
    torch.testing.assert_close(left[keep], states[keep], atol=5e-4, rtol=5e-4)


def by_step(
    runner: HeadRunner, shape: StepShape, parts: list[Part], given: GivenFeatures | None
) -> tuple[torch.Tensor, torch.Tensor]:
    told = ToldStates(runner.model, shape.padded_rows)
    layers = partial(HeadStepLayers, runner._states, told)
    one = Step(runner.model, runner.kv, shape, 3, make_layers=layers)
    one.inputs.clear(DUMMY)
    rows = logit_rows(parts)
    runs, moves = step_runs(parts, [None] * len(rows), BLOCK)
    one.inputs.fill(runs, DUMMY, moves)
    with torch.inference_mode():
        if given is not None:
            places = torch.tensor(runner._rows_told(parts, given.counts))
            told.put(places, runner._combined(given))
        one.run()
        told.clear()
    assert one.logits is not None
    assert one.head_rows == SHAPE["vocab_size"]
    assert one.guesses_on(0)[rows, 0].tolist() == one.logits[rows].argmax(-1).tolist()
    return one.logits[rows].clone(), runner._states.rows.clone()


def test_rows_go_on_from_told_and_from_own_states(heads: HeadRunner) -> None:
    """Some are told, some go on by themselves, and one begins a text."""
    parts: list[Part] = [
        Chunk(tokens(3, 2), LENGTHS[0], BLOCKS[0], 1),
        Chunk(tokens(1, 3), LENGTHS[1], BLOCKS[1], 1),
        Chunk(tokens(1, 4), 0, [20], 1),
    ]
    compare(heads, FEW, parts, features((3, 0, 1), 2))


def test_what_was_told_is_forgotten_after_its_step(heads: HeadRunner) -> None:
    parts: list[Part] = [Chunk(tokens(1, 6), LENGTHS[1] + 1, BLOCKS[1], 1)]
    compare(heads, FEW, parts)


def test_branches_go_on_from_what_they_leave(heads: HeadRunner) -> None:
    """The first tokens go on from the text, those after them from their own branch, and the branch
    that is taken is moved."""
    limits = (18, 19, 19, 16)
    for level in range(2):
        compare(heads, TREE, [branches(level, limits)])
    taken = [SCRATCH + 1, SCRATCH + len(limits) + 1]
    moved = KVCopy(taken, 20, BLOCKS[0])
    chunk = Chunk(tokens(1, 9), 22, BLOCKS[0], 1)
    compare(heads, TREE, [moved, chunk])
