"""A draft inside the target's engine guesses the same tokens wherever they are drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ssd_engine.batch import Draw, Part
from ssd_engine.completion import StopRules
from ssd_engine.model_store import resolve_model
from ssd_engine.runner import ModelRunner
from ssd_engine.sampling import SampleRow, sample
from ssd_engine.sampling_params import SamplingParams
from ssd_engine.scored import Computed, Scored
from ssd_target.sequence import Sequence as TargetSequence
from ssd_target.speculation.sync_drafter import DraftRow, SyncDrafter
from tests.harness import BLOCK, make_runner

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.5),
    "bias": dict(logit_bias=((20, 3.0), (30, -2.0)), frequency_penalty=3.0),
}


class Device:
    """Draws tokens where the logits are."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> "Device":
        logits = self._runner.forward(parts)
        assert logits is not None
        self._drawn = sample(logits, [_row_of(draw) for draw in draws if draw is not None])
        return self

    def done(self) -> bool:
        return True

    @property
    def rows(self) -> Sequence[int]:
        return ()

    def result(self) -> Scored:
        return Scored(lambda: None, following=np.array(self._drawn, dtype=np.int32))


class Host:
    """Leaves that to others."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> Computed:
        return Computed(lambda: self._runner.forward(parts))


def _row_of(draw: Draw) -> SampleRow:
    if (history := draw.history) is None:
        return SampleRow(SamplingParams(draw.seed, draw.temperature), (), range(draw.position))
    params = replace(history.params, temperature=draw.temperature)
    row = SampleRow(params, history.prompt, [*history.output, *draw.path])
    assert row.position == draw.position
    return row


@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_are_the_same_wherever_they_are_drawn(options: str) -> None:
    guesses = []
    for kind in (Host, Device):
        with torch.backends.mkldnn.flags(enabled=False):
            drafter = SyncDrafter(
                kind(make_runner(resolve_model("stories-draft"))), BLOCK, 256, 6, 64
            )
            sampling = SamplingParams(seed=1, temperature=0.0, **OPTIONS[options])
            sequence = TargetSequence(
                1, list(range(10, 30)), [40], sampling, StopRules(100), None, [b"x"] * 512
            )
            rows = [DraftRow(sequence, 6, None) for _ in range(3)]
            for row in rows:
                drafter.draft([row])
                for token in row.tokens[:4]:
                    sequence.commit(token)
            guesses.append([row.tokens for row in rows])
    assert guesses[0] == guesses[1]
    assert all(len(tokens) == 6 for tokens in guesses[0])
