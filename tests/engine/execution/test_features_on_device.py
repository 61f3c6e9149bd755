"""Features of captured steps, and heads that read them, on a CUDA device. Runs where there is
one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config, parse_model_config
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, TreeRows
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.params import SamplingParams
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.head_drafter import HeadDrafter
from tests import clockwork
from tests.harness import BLOCK, Request, Result, run
from tests.random_models import make_model
from tools.gpu.check import random_weights
from tools.gpu.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cuda",
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_forward_tokens": 128,
    "num_kv_blocks": 256,
}
BOUNDARIES = (4, 0, 1, 5)  # of five layers, three of which are in the first piece of a step
ROUNDING = 0.03


@pytest.fixture(scope="module", params=["llama-3.2-1b", "qwen3-0.6b", "olmo2-7b"])
def stepper(request: pytest.FixtureRequest) -> ModelRunner:
    name = next(each for each in SHAPES if each.startswith(request.param))
    config = parse_model_config({**SHAPES[name], "num_hidden_layers": 5})
    options = RunnerOptions(directory=Path(), step_rows=6, **SETTINGS)
    return ModelRunner(config, options, SingleRank(), random_weights)


def step(runner: ModelRunner, *chunks: Chunk) -> tuple[Tensor, Tensor | None]:
    rows = sum(chunk.num_logits for chunk in chunks)
    result = runner.step(chunks, [None] * rows).result()
    return result.logits, result.features


def off(got: Tensor | None, wanted: Tensor | None) -> float:
    assert got is not None
    assert wanted is not None
    assert got.shape == wanted.shape
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_captured_step_tells_the_residual_stream(stepper: ModelRunner) -> None:
    own, theirs = list(range(20)), list(range(20, 40))
    chunks = [Chunk([7, 8, 9, 10], 120, own, 4), Chunk([3], 90, theirs, 1)]
    stepper.watch(())
    stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    stepper.forward([Chunk(list(range(9, 99)), 0, theirs, 0)])
    plain, told = step(stepper, *chunks)
    assert told is None
    stepper.watch(BOUNDARIES)
    stepper.forward(chunks)
    expected = stepper.features
    for _ in range(3):  # on both sides
        logits, told = step(stepper, *chunks)
        assert torch.equal(logits, plain)
        assert off(told, expected) < ROUNDING
        alone, of_one = step(stepper, chunks[1])
        assert told is not None
        assert of_one is not None
        assert torch.equal(alone, plain[4:])
        assert torch.equal(of_one, told[4:])  # a row's bits depend on that row alone
    stepper.watch((2,))
    stepper.forward(chunks)
    _, told = step(stepper, *chunks)
    assert off(told, stepper.features) < ROUNDING
    stepper.watch(())
    assert step(stepper, *chunks)[1] is None


def test_rows_stay_while_the_next_step_is_computed(stepper: ModelRunner) -> None:
    own = list(range(20))
    stepper.watch(BOUNDARIES)
    stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    chunks = [[Chunk([token], 120, own, 1)] for token in (7, 8, 9)]
    expected = [step(stepper, *each)[1] for each in chunks]
    flights = [stepper.step(each, [None]) for each in chunks[:2]]
    first = flights[0].result()
    with stepper.beside_forwards():
        told = first.features
    flights.append(stepper.step(chunks[2], [None]))
    for flight, wanted in zip(flights[1:], expected[1:], strict=True):
        features = flight.result().features
        torch.cuda.synchronize()
        assert features is not None
        assert wanted is not None
        assert torch.equal(features, wanted)
    assert told is not None
    assert expected[0] is not None
    assert torch.equal(told, expected[0])
    stepper.watch(())


@pytest.mark.parametrize("kind", ["llama", "qwen3-all-norms", "llama-norm-of-each-feature"])
@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)], ids=str
)
def test_a_head_computes_what_it_does_on_a_cpu(
    kind: str, dtype: str, rows: int, tmp_path: Path
) -> None:
    """A prompt with features, then a row that is told and one that goes on by itself, then two
    branches. ``rows``: of a sequence in a captured step."""
    random_heads = pytest.importorskip("tests.random_heads", exc_type=ImportError)
    vocab, width = (random_heads.SHAPE[name] for name in ("vocab_size", "hidden_size"))
    make_model("llama3-untied", tmp_path / "target")
    head_size = {"head_dim": 16}  # what our kernels are written for
    random_heads.make_head(random_heads.KINDS[kind], tmp_path / "head", **head_size)
    config = load_head_config(tmp_path / "head")
    tokens = torch.randint(vocab, (40,)).tolist()
    features = torch.randn(40, 3 * width)
    blocks, scratch = list(range(4)), [5 * BLOCK, 5 * BLOCK + 1]
    found = []
    for device, own in (("cpu", "float32"), ("cuda", dtype)):
        captured = dict(step_rows=rows, branches=2, max_tail=4, ranks=5, exact=False)
        options = RunnerOptions(
            directory=tmp_path / "head",
            **{**SETTINGS, "device": device, "dtype": own, **(captured if rows else {})},
        )
        checkpoint = open_head(tmp_path / "head", config, tmp_path / "target")
        heads = HeadRunner(config, checkpoint, options, vocab)
        if rows and device == "cuda":
            assert heads.steps is not None
        tree = TreeRows([7, 9], [42, 42], [41, 41], scratch, 42, blocks, scratch)
        later = GivenFeatures([1], features[39:])
        forwards = [
            (Chunk(tokens[:39], 0, blocks, 39), GivenFeatures([39], features[:39])),
            (Chunk(tokens[39:], 39, blocks, 1), later),
            (Chunk([5], 40, blocks, 1), GivenFeatures([0], features[:0])),
            (Chunk([6], 41, blocks, 1), GivenFeatures([0], features[:0])),
            (tree, GivenFeatures([0], features[:0])),
        ]
        logits = []
        for part, given in forwards:
            draws = [None] * part.num_logits
            logits.append(heads.step_with_features([part], draws, given).result().logits.cpu())
        found.append(torch.cat(logits))
    cpu, cuda = found
    drafted = cpu.isfinite()
    assert torch.equal(drafted, cuda.isfinite())
    assert off(cuda[drafted], cpu[drafted]) < (1e-3 if dtype == "float32" else 0.1)


DEPTH = 4
SYNC = SpeculationRequest(mode=Mode.SYNC, depth=DEPTH)
OFF = SpeculationRequest(mode=Mode.OFF)


def speak(
    runner: ModelRunner, drafter: HeadDrafter | None, temperature: float, chunk: int = 32
) -> list[Result]:
    speculation = SYNC if drafter is not None else OFF
    requests = [
        Request(
            [(5 * i + 11 * seed) % clockwork.VOCAB for i in range(50 + seed)],
            SamplingParams(seed=seed, temperature=temperature),
            max_tokens=60,
            speculation=speculation,
        )
        for seed in range(4)
    ]
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    speculator = SpeculationCoordinator(options, clockwork.VOCAB, drafter=drafter)
    size = runner.config.vocab_size
    core = EngineCore(
        runner, [b""] * size, BLOCK, 4, chunk, speculator, replay_rows=runner.options.step_rows
    )
    return run(core, requests)


@pytest.mark.parametrize("by_steps", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_inside_a_target_changes_no_text_and_foresees_it(
    temperature: float, by_steps: bool, tmp_path: Path
) -> None:
    clockwork.make_target(tmp_path / "target")
    clockwork.make_head(tmp_path / "head")
    model = load_model_config(tmp_path / "target")
    options = RunnerOptions(directory=tmp_path / "target", step_rows=DEPTH + 1, **SETTINGS)
    config = fit_to_target(load_head_config(tmp_path / "head"), model, "target")
    checkpoint = open_head(tmp_path / "head", config, tmp_path / "target")
    captured = dict(step_rows=DEPTH + 1, ranks=2, max_path=DEPTH) if by_steps else {}
    own = RunnerOptions(directory=tmp_path / "head", exact=False, **SETTINGS, **captured)
    heads = HeadRunner(config, checkpoint, own, clockwork.VOCAB)
    runner = ModelRunner(model, options, SingleRank())
    expected = speak(runner, None, temperature)
    runner.watch(config.boundaries or ())
    drafter = HeadDrafter(heads, BLOCK, 512, DEPTH, 32)
    found = speak(runner, drafter, temperature)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    stats = [each.speculation for each in found if each.speculation is not None]
    drafted = sum(each.drafted_tokens for each in stats)
    assert drafted > 0
    rate = sum(each.accepted_tokens for each in stats) / drafted
    assert rate > (0.95 if temperature == 0.0 else 0.2)
