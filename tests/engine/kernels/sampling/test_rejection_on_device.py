"""Where kernels draw and judge tokens, texts follow the target's distribution."""

from typing import Any

import numpy as np
import pytest
import torch

from ssd_engine.forward.batch import Draw, drawing_of
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import SampledSpeculation
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from tests.fits import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, DEPTH, AT_ONCE = 3000, 2, 64
BATCHES = 300
PASSES = 1e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "filters": dict(temperature=0.7, top_k=40, top_p=0.9),
    "hot": dict(temperature=1.3, min_p=0.01),
}


@pytest.mark.parametrize("down_weight", [1.0, 0.5])
@pytest.mark.parametrize("options", OPTIONS)
def test_texts_follow_the_targets_distribution(options: str, down_weight: float) -> None:
    from ssd_engine.execution.step_drawing import StepDrawing
    from ssd_engine.forward.step_inputs import StepRun, StepShape
    from ssd_engine.kernels.sampling.rejecting import Rejector

    device, generator = torch.device("cuda"), torch.Generator().manual_seed(3)
    target = 3 * torch.randn(DEPTH + 1, VOCAB, generator=generator)
    draft = target[:DEPTH] + torch.randn(DEPTH, VOCAB, generator=generator)
    shape = StepShape(AT_ONCE * (DEPTH + 1), AT_ONCE, DEPTH + 1, max_positions=1, block_size=1)
    judging = StepDrawing(shape, VOCAB, device, 1, overlap=False)
    guessed = StepShape(AT_ONCE * DEPTH, AT_ONCE, DEPTH, max_positions=1, block_size=1)
    drafting = StepDrawing(guessed, VOCAB, device, 17, overlap=False)
    rejector = Rejector(AT_ONCE, shape.rows, DEPTH + 1, VOCAB, device)
    said: list[list[int]] = [[] for _ in range(DEPTH + 1)]
    with torch.inference_mode():
        for batch in range(BATCHES):
            seeds = [(AT_ONCE * batch + i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(AT_ONCE)]
            params = [SamplingParams(seed=seed, **OPTIONS[options]) for seed in seeds]
            drafting.inputs.clear(0)
            how = [
                [Draw.of(p, i)._replace(width=3, down_weight=down_weight) for i in range(DEPTH)]
                for p in params
            ]
            runs = [StepRun([0] * DEPTH, *[[0] * DEPTH] * 3, [0], draws=each) for each in how]
            drafting.inputs.fill(runs, 0)
            drafting.inputs.copy()
            drafting.draw(draft.repeat(AT_ONCE, 1).to(device))
            lines = drafting.drawn.view(guessed.rows, -1).cpu().numpy()
            tokens = lines[:, drafting.ranks].reshape(AT_ONCE, DEPTH).tolist()
            wires = drafting.sigma_of(lines).wire().view(AT_ONCE, DEPTH, VOCAB)
            judging.inputs.clear(0)
            draws = [[Draw.of(p, i) for i in range(DEPTH + 1)] for p in params]
            rows = [[0] * (DEPTH + 1)] * 3
            runs = [
                StepRun([0, *t], *rows, [0], draws=d) for t, d in zip(tokens, draws, strict=True)
            ]
            begins = judging.inputs.fill(runs, 0)
            judging.inputs.copy()
            logits, drawing = target.repeat(AT_ONCE, 1).to(device), drawing_of(draws[0])
            judging.draw(logits, drawing)
            rounds = [
                (begin, SampledSpeculation(seed, 0, t, wire))
                for begin, seed, t, wire in zip(begins, seeds, tokens, wires, strict=True)
            ]
            verdicts = rejector.judge(judging.scores(logits, drawing), rounds)
            for t, verdict in zip(tokens, verdicts, strict=True):
                for place, token in enumerate([*t[: verdict.accepted], verdict.token]):
                    said[place].append(token)
    rows_of_p = [SampleRow(SamplingParams(seed=0, **OPTIONS[options]), (), ())] * (DEPTH + 1)
    p = target_distribution(target, rows_of_p).numpy()
    results = [fit(np.array(each), row) for each, row in zip(said, p, strict=True)]
    print([len(each) for each in said], results)
    assert len(said[0]) > len(said[1]) > len(said[2]) > 1000
    assert min(results) * len(results) > PASSES
