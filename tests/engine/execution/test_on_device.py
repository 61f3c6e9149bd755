"""The same engine on a CUDA device, with features of captured steps and heads that read them.
Runs where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import load_model_config, parse_model_config
from ssd_engine.checkpoints.model_expansion import parse_shape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.device_layer_ops import FusedOps
from ssd_engine.execution.graphs import GraphRunner, step_runs
from ssd_engine.execution.head_runner import GivenFeatures
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, TreeRows
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.params import MAX_TEMPERATURE, SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.head_drafter import HeadDrafter
from tests import clockwork
from tests.engine.execution.emulated_device import head_runner
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model
from tools.gpu.check import random_weights
from tools.gpu.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_shipped_target_tells_the_same_stories_as_on_cpu() -> None:
    directory = resolve_model("stories-target")
    requests = [
        Request(
            list(range(3 + i, 20 + 7 * i)),
            SamplingParams(seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2]),
            max_tokens=64,
        )
        for i in range(12)
    ]
    on_cpu, on_gpu = (
        run(make_core(make_runner(directory, device=device)), requests)
        for device in ("cpu", "cuda")
    )
    assert [result.tokens for result in on_gpu] == [result.tokens for result in on_cpu]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_follow_the_cpu(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    chunks = [Chunk(list(range(3, 80)), 0, [4, 1, 7, 2, 9], 77), Chunk([5, 6], 0, [3], 2)]
    cpu = make_runner(tmp_path, 256).forward(chunks)
    exact = make_runner(tmp_path, 256, device="cuda").forward(chunks)
    rough = make_runner(tmp_path, 256, device="cuda", dtype="bfloat16").forward(chunks)
    assert (cpu - exact.cpu()).abs().max().item() < 1e-3
    assert off(rough.cpu(), cpu) < 0.05


@pytest.mark.parametrize("family", ["mistral", "olmo2", "olmo2-biases", "qwen3"])
def test_a_captured_step_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    """In float32, token after token; a prefill comes first."""
    oracle = make_model(family, tmp_path).cuda()
    runner = make_runner(tmp_path, device="cuda", kernels="torch")
    model, blocks, dummy = runner.model, list(range(32)), 511 * BLOCK
    eps = runner.config.qk_norm_eps
    model.ops = FusedOps(model.rope, eps, model.num_heads, model.num_kv_heads)
    shape = StepShape(rows=8, runs=1, rows_per_run=1, max_positions=512, block_size=BLOCK)
    one = Step(model, runner.kv, shape, 1)
    graphs = GraphRunner([one], eager=False)
    with torch.inference_mode():
        graphs.capture(dummy)
    tokens, count = list(range(3, 60)), 100
    prefilled = runner.forward([Chunk(tokens, 0, blocks, 1)])
    found = [prefilled[-1]]
    for _ in range(count):
        tokens.append(int(found[-1].argmax()))
        runs, moves = step_runs([Chunk(tokens[-1:], len(tokens) - 1, blocks, 1)], [None], BLOCK)
        (begin,) = one.inputs.fill(runs, dummy, moves)
        graphs.replay(one, 0)
        torch.cuda.synchronize()
        found.append(one.layers.logits[begin, : runner.config.vocab_size].clone())
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens], device="cuda")).logits[0, -count - 1 :]
    assert torch.equal(torch.stack(found).argmax(-1), expected.argmax(-1))
    assert float((torch.stack(found) - expected).abs().max()) < 1e-4


def test_samples_are_the_same_on_every_device() -> None:
    logits = 3 * torch.randn(32, 5000, generator=torch.Generator().manual_seed(1))
    rows = [
        SampleRow(
            SamplingParams(
                seed=i,
                temperature=(0.0, 0.7, 1.5)[i % 3],
                top_k=(0, 40)[i % 2],
                top_p=(1.0, 0.8)[i % 4 == 1],
                min_p=(0.0, 0.01)[i % 5 == 1],
                repetition_penalty=(1.0, 1.2)[i % 7 == 1],
                frequency_penalty=(0.0, 0.5)[i % 7 == 2],
                logit_bias=((7, 2.0),),
            ),
            [1, 2, 3],
            [3, 4, 4],
        )
        for i in range(32)
    ]
    assert sample(logits, rows) == sample(logits.cuda(), rows)


def test_the_cache_is_sized_from_free_memory() -> None:
    runner = make_runner(
        resolve_model("stories-target"), num_blocks=None, max_num_seqs=4, device="cuda"
    )
    assert runner.num_blocks == 4 * 2048 // 16


# Steps of few rows, in bf16, in the shapes of published models, on weights of which none is zero

DENSE = ("llama-3.2-1b", "qwen2.5-1.5b", "qwen3-0.6b")
GROWN = "hidden=1024,layers=8,heads=16,kv_heads=4,head_dim=64,ff=4096,vocab=16384"
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cuda",
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_forward_tokens": 128,
}
FEW_BLOCKS: dict[str, Any] = {**SETTINGS, "num_kv_blocks": 256}


def make_stepper(shape: str, layers: int = 2, **changes: Any) -> ModelRunner:
    config = parse_model_config({**SHAPES[shape], "num_hidden_layers": layers})
    options = RunnerOptions(directory=Path(), step_rows=6, **{**SETTINGS, **changes})
    return ModelRunner(config, options, SingleRank(), random_weights)


def step(runner: ModelRunner, *chunks: Chunk) -> tuple[Tensor, Tensor | None]:
    """Logits, and features where they are watched."""
    rows = sum(chunk.num_logits for chunk in chunks)
    result = runner.step(chunks, [None] * rows).result()
    return result.logits, result.features


def off(got: Tensor | None, wanted: Tensor | None) -> float:
    assert got.shape == wanted.shape
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(scope="module", params=DENSE)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stepper(shape: str) -> ModelRunner:
    return make_stepper(shape)


def step_and_forward(stepper: ModelRunner) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = list(range(20))
    stepper.forward([Chunk(list(range(5, 125)), 0, blocks, 0)])
    chunk = Chunk([7, 8, 9, 10], 120, blocks, 4)
    expected = stepper.forward([chunk])
    return step(stepper, chunk)[0], expected


def test_a_captured_step_computes_what_the_plain_forward_does(stepper: ModelRunner) -> None:
    assert off(*step_and_forward(stepper)) < 3e-2


def test_a_grown_model_samples_over_its_whole_head() -> None:
    directory = resolve_model("stories-target")
    expanded = dict(expand_to=parse_shape(GROWN), step_rows=6)
    options = RunnerOptions(directory=directory, **expanded, **SETTINGS)
    grown = ModelRunner(load_model_config(directory), options, SingleRank())
    got, expected = step_and_forward(grown)
    assert got.shape[1] == grown.config.head_rows
    vocab = grown.config.vocab_size
    got, filler = got[:, :vocab], got[:, vocab:]
    assert off(got, expected[:, :vocab]) < 2e-2
    assert filler.isfinite().all()
    assert (got.amin(dim=1) - filler.amax(dim=1)).min().item() > 22.9 * MAX_TEMPERATURE


def test_a_row_of_a_captured_step_has_the_same_bits_whatever_else_runs(
    stepper: ModelRunner,
) -> None:
    own, theirs = list(range(20)), list(range(20, 40))
    stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    stepper.forward([Chunk(list(range(9, 99)), 0, theirs, 0)])
    text = [7, 8, 9, 10, 11]
    alone = [step(stepper, Chunk([t], 120 + i, own, 1))[0] for i, t in enumerate(text)]
    verified, _ = step(stepper, Chunk(text, 120, own, 5))
    assert torch.equal(verified, torch.cat(alone))
    among, _ = step(stepper, Chunk([3] * 6, 90, theirs, 6), Chunk(text, 120, own, 5))
    assert torch.equal(among[6:], verified)


def test_a_step_launched_kernel_by_kernel_has_the_same_bits(
    stepper: ModelRunner, shape: str
) -> None:
    eager = make_stepper(shape, eager=True)
    for runner in (stepper, eager):
        runner.forward([Chunk(list(range(5, 125)), 0, list(range(20)), 0)])
    chunk = Chunk([7, 8, 9], 120, list(range(20)), 3)
    assert torch.equal(step(stepper, chunk)[0], step(eager, chunk)[0])


def test_a_prefill_has_the_same_bits_alone_and_among_others(stepper: ModelRunner) -> None:
    mine = Chunk(list(range(5, 45)), 0, list(range(4)), 1)
    other = Chunk(list(range(70, 140)), 0, list(range(10, 16)), 1)
    alone = stepper.forward([mine])
    together = stepper.forward([other, mine])
    assert torch.equal(alone[0], together[1])


# Features, and heads that read them


BOUNDARIES = (4, 0, 1, 5)  # of five layers, three of which are in the first piece of a step
ROUNDING = 0.03


@pytest.fixture(scope="module", params=["llama-3.2-1b", "qwen3-0.6b", "olmo2-7b"])
def watched_stepper(request: pytest.FixtureRequest) -> ModelRunner:
    name = next(each for each in SHAPES if each.startswith(request.param))
    return make_stepper(name, layers=5, num_kv_blocks=256)


def test_a_captured_step_tells_the_residual_stream(watched_stepper: ModelRunner) -> None:
    own, theirs = list(range(20)), list(range(20, 40))
    chunks = [Chunk([7, 8, 9, 10], 120, own, 4), Chunk([3], 90, theirs, 1)]
    watched_stepper.watch(())
    watched_stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    watched_stepper.forward([Chunk(list(range(9, 99)), 0, theirs, 0)])
    plain, told = step(watched_stepper, *chunks)
    assert told is None
    watched_stepper.watch(BOUNDARIES)
    watched_stepper.forward(chunks)
    expected = watched_stepper.features
    for _ in range(3):  # on both sides
        logits, told = step(watched_stepper, *chunks)
        assert torch.equal(logits, plain)
        assert off(told, expected) < ROUNDING
        alone, of_one = step(watched_stepper, chunks[1])
        assert torch.equal(alone, plain[4:])
        assert torch.equal(of_one, told[4:])  # a row's bits depend on that row alone
    watched_stepper.watch((2,))
    watched_stepper.forward(chunks)
    _, told = step(watched_stepper, *chunks)
    assert off(told, watched_stepper.features) < ROUNDING
    watched_stepper.watch(())
    assert step(watched_stepper, *chunks)[1] is None


def test_rows_stay_while_the_next_step_is_computed(watched_stepper: ModelRunner) -> None:
    own = list(range(20))
    watched_stepper.watch(BOUNDARIES)
    watched_stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    chunks = [[Chunk([token], 120, own, 1)] for token in (7, 8, 9)]
    expected = [step(watched_stepper, *each)[1] for each in chunks]
    flights = [watched_stepper.step(each, [None]) for each in chunks[:2]]
    first = flights[0].result()
    with watched_stepper.beside_forwards():
        told = first.features
    flights.append(watched_stepper.step(chunks[2], [None]))
    for flight, wanted in zip(flights[1:], expected[1:], strict=True):
        features = flight.result().features
        torch.cuda.synchronize()
        assert torch.equal(features, wanted)
    assert torch.equal(told, expected[0])
    watched_stepper.watch(())


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
    tokens = torch.randint(vocab, (40,)).tolist()
    features = torch.randn(40, 3 * width)
    blocks, scratch = list(range(4)), [5 * BLOCK, 5 * BLOCK + 1]
    found = []
    for device, own in (("cpu", "float32"), ("cuda", dtype)):
        captured = dict(step_rows=rows, branches=2, max_tail=4, ranks=5, exact=False)
        settings = {**FEW_BLOCKS, "device": device, "dtype": own, **(captured if rows else {})}
        heads = head_runner(tmp_path, vocab, **settings)
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


def speak(runner: ModelRunner, drafter: HeadDrafter | None, temperature: float) -> list[Result]:
    mode = Mode.OFF if drafter is None else Mode.SYNC
    requests = [
        Request(
            [(5 * i + 11 * seed) % clockwork.VOCAB for i in range(50 + seed)],
            SamplingParams(seed=seed, temperature=temperature),
            max_tokens=60,
            speculation=SpeculationRequest(mode=mode, depth=DEPTH),
        )
        for seed in range(4)
    ]
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    speculator = SpeculationCoordinator(options, clockwork.VOCAB, drafter=drafter)
    table = [b""] * runner.config.vocab_size
    rows = runner.options.step_rows
    return run(EngineCore(runner, table, BLOCK, 4, 32, speculator, replay_rows=rows), requests)


@pytest.mark.parametrize("by_steps", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_inside_a_target_changes_no_text_and_foresees_it(
    temperature: float, by_steps: bool, tmp_path: Path
) -> None:
    clockwork.make_target(tmp_path / "target")
    clockwork.make_head(tmp_path / "head")
    model = load_model_config(tmp_path / "target")
    options = RunnerOptions(directory=tmp_path / "target", step_rows=DEPTH + 1, **FEW_BLOCKS)
    captured = dict(step_rows=DEPTH + 1, ranks=2, max_path=DEPTH) if by_steps else {}
    heads = head_runner(tmp_path, clockwork.VOCAB, exact=False, **FEW_BLOCKS, **captured)
    runner = ModelRunner(model, options, SingleRank())
    expected = speak(runner, None, temperature)
    runner.watch(heads._config.boundaries or ())
    drafter = HeadDrafter(heads, BLOCK, 512, DEPTH, 32)
    found = speak(runner, drafter, temperature)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    stats = [each.speculation for each in found if each.speculation is not None]
    drafted = sum(each.drafted_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    assert accepted > (0.95 if temperature == 0.0 else 0.2) * drafted > 0
