"""The same engine on a CUDA device. Runs where there is one."""

from pathlib import Path

import pytest
import torch

from ssd_engine.batch import Chunk
from ssd_engine.model_store import resolve_model
from ssd_engine.noise import gumbel_rows
from ssd_engine.sampling import SampleRow, sample
from ssd_engine.sampling_params import SamplingParams
from tests.harness import Request, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model

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
