"""The same engine on a CUDA device. Runs where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.checkpoints.model_config import load_model_config, parse_model_config
from ssd_engine.checkpoints.model_expansion import parse_shape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.device_layer_ops import FusedOps
from ssd_engine.execution.graphs import GraphRunner, step_runs
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.noise import gumbel_rows
from ssd_engine.sampling.params import MAX_TEMPERATURE, SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from tests.harness import BLOCK, Request, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model
from tools.gpu.check import random_weights
from tools.gpu.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def requests() -> list[Request]:
    return [
        Request(
            list(range(3 + i, 20 + 7 * i)),
            SamplingParams(seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2]),
            max_tokens=64,
        )
        for i in range(12)
    ]


def test_the_shipped_target_tells_the_same_stories_as_on_cpu() -> None:
    directory = resolve_model("stories-target")
    results = [
        [r.tokens for r in run(make_core(make_runner(directory, device=device)), requests())]
        for device in ("cpu", "cuda")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_follow_the_cpu(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    chunks = [Chunk(list(range(3, 80)), 0, [4, 1, 7, 2, 9], 77), Chunk([5, 6], 0, [3], 2)]
    cpu = make_runner(tmp_path, 256).forward(chunks)
    exact = make_runner(tmp_path, 256, device="cuda").forward(chunks)
    rough = make_runner(tmp_path, 256, device="cuda", dtype="bfloat16").forward(chunks)
    assert cpu is not None
    assert exact is not None
    assert rough is not None
    assert (cpu - exact.cpu()).abs().max().item() < 1e-3
    assert ((cpu - rough.cpu()).norm() / cpu.norm()).item() < 0.05


@pytest.mark.parametrize("family", ["mistral", "olmo2", "olmo2-biases", "qwen3"])
def test_a_captured_step_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    """In float32, token after token; a prefill comes first."""
    oracle = make_model(family, tmp_path).cuda()
    runner = make_runner(tmp_path, device="cuda", kernels="torch")
    model, blocks, dummy = runner.model, list(range(32)), 511 * BLOCK
    eps = runner.config.qk_norm_eps
    model.ops = FusedOps(model.rope, eps, model.num_heads, model.num_kv_heads)
    shape = StepShape(rows=8, runs=1, rows_per_run=1, max_positions=512, block_size=BLOCK)
    step = Step(model, runner.kv, shape, 1)
    graphs = GraphRunner([step], eager=False)
    with torch.inference_mode():
        graphs.capture(dummy)
    tokens, count = list(range(3, 60)), 100
    prefilled = runner.forward([Chunk(tokens, 0, blocks, 1)])
    assert prefilled is not None
    found = [prefilled[-1]]
    for _ in range(count):
        tokens.append(int(found[-1].argmax()))
        runs, moves = step_runs([Chunk(tokens[-1:], len(tokens) - 1, blocks, 1)], [None], BLOCK)
        (begin,) = step.inputs.fill(runs, dummy, moves)
        graphs.replay(step, 0)
        torch.cuda.synchronize()
        found.append(step.layers.logits[begin, : runner.config.vocab_size].clone())
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens], device="cuda")).logits[0, -count - 1 :]
    assert torch.equal(torch.stack(found).argmax(-1), expected.argmax(-1))
    assert float((torch.stack(found) - expected).abs().max()) < 1e-4


def test_the_noise_is_the_same_on_every_device() -> None:
    seed, position = torch.tensor([1, -5, 2**62]), torch.tensor([0, 7, 2**33])
    cpu = gumbel_rows(seed, position, 150_000)
    cuda = gumbel_rows(seed.cuda(), position.cuda(), 150_000).cpu()
    assert (cpu - cuda).abs().max().item() < 1e-12


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
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_forward_tokens": 128,
    "step_rows": 6,
}


def make_stepper(shape: str, **changes: Any) -> ModelRunner:
    config = parse_model_config({**SHAPES[shape], "num_hidden_layers": 2})
    options = RunnerOptions(directory=Path(), **SETTINGS, **changes)
    return ModelRunner(config, options, SingleRank(), random_weights)


@pytest.fixture(scope="module", params=DENSE)
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def stepper(shape: str) -> ModelRunner:
    return make_stepper(shape)


def logits_of(runner: ModelRunner, *chunks: Chunk) -> torch.Tensor:
    rows = sum(chunk.num_logits for chunk in chunks)
    return runner.step(chunks, [None] * rows).result().logits


def step_and_forward(stepper: ModelRunner) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = list(range(20))
    stepper.forward([Chunk(list(range(5, 125)), 0, blocks, 0)])
    chunk = Chunk([7, 8, 9, 10], 120, blocks, 4)
    expected = stepper.forward([chunk])
    assert expected is not None
    return logits_of(stepper, chunk), expected


def test_a_captured_step_computes_what_the_plain_forward_does(stepper: ModelRunner) -> None:
    got, expected = step_and_forward(stepper)
    assert float((got - expected).norm() / expected.norm()) < 3e-2


def test_a_grown_model_samples_over_its_whole_head() -> None:
    directory = resolve_model("stories-target")
    options = RunnerOptions(directory=directory, expand_to=parse_shape(GROWN), **SETTINGS)
    grown = ModelRunner(load_model_config(directory), options, SingleRank())
    got, expected = step_and_forward(grown)
    assert got.shape[1] == grown.config.head_rows
    vocab = grown.config.vocab_size
    got, filler = got[:, :vocab], got[:, vocab:]
    expected = expected[:, :vocab]
    assert float((got - expected).norm() / expected.norm()) < 2e-2
    assert filler.isfinite().all()
    assert (got.amin(dim=1) - filler.amax(dim=1)).min().item() > 22.9 * MAX_TEMPERATURE


def test_a_row_of_a_captured_step_has_the_same_bits_whatever_else_runs(
    stepper: ModelRunner,
) -> None:
    own, theirs = list(range(20)), list(range(20, 40))
    stepper.forward([Chunk(list(range(5, 125)), 0, own, 0)])
    stepper.forward([Chunk(list(range(9, 99)), 0, theirs, 0)])
    text = [7, 8, 9, 10, 11]
    alone = [logits_of(stepper, Chunk([t], 120 + i, own, 1)) for i, t in enumerate(text)]
    verified = logits_of(stepper, Chunk(text, 120, own, 5))
    assert torch.equal(verified, torch.cat(alone))
    among = logits_of(stepper, Chunk([3] * 6, 90, theirs, 6), Chunk(text, 120, own, 5))
    assert torch.equal(among[6:], verified)


def test_a_step_launched_kernel_by_kernel_has_the_same_bits(
    stepper: ModelRunner, shape: str
) -> None:
    eager = make_stepper(shape, eager=True)
    for runner in (stepper, eager):
        runner.forward([Chunk(list(range(5, 125)), 0, list(range(20)), 0)])
    chunk = Chunk([7, 8, 9], 120, list(range(20)), 3)
    assert torch.equal(logits_of(stepper, chunk), logits_of(eager, chunk))


def test_a_prefill_has_the_same_bits_alone_and_among_others(stepper: ModelRunner) -> None:
    mine = Chunk(list(range(5, 45)), 0, list(range(4)), 1)
    other = Chunk(list(range(70, 140)), 0, list(range(10, 16)), 1)
    alone = stepper.forward([mine])
    together = stepper.forward([other, mine])
    assert alone is not None
    assert together is not None
    assert torch.equal(alone[0], together[1])
