"""A draft inside the target's engine guesses the same tokens wherever they are drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Draw, Part
from ssd_engine.forward.result import ImmediateForward, PendingForward
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import whole_wire
from ssd_engine.text.completion import StopRules
from ssd_target.config import DRAFT_STEP_ROWS
from ssd_target.scheduling.sequence import Sequence as TargetSequence
from ssd_target.speculation.sync_drafter import STEPPED_ROWS, DraftRow, SyncDrafter
from tests.harness import BLOCK, make_runner
from tests.ranking_runner import Ranking

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.5),
    "bias": dict(logit_bias=((20, 3.0), (30, -2.0)), frequency_penalty=3.0),
}


class Host:
    """Leaves that to others."""

    chains = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks

    def deepen(self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]) -> None:
        raise AssertionError("it does not chain")

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> ImmediateForward:
        return ImmediateForward(lambda: self._runner.forward(parts))


KINDS: dict[str, Callable[[ModelRunner], Any]] = {
    "host": Host,
    "device": lambda runner: Ranking(runner, chains=False),
    "in a chain": lambda runner: Ranking(runner, chains=True),
}


@pytest.mark.parametrize("down_weight", [None, 0.5], ids=["coupled", "rejection"])
@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_are_the_same_wherever_they_are_drawn(
    options: str, down_weight: float | None
) -> None:
    """Of two sequences, one of which wants fewer; some guesses are right."""
    guesses: dict[str, list[list[int]]] = {}
    wires: dict[str, list[Tensor]] = {}
    for kind, make in KINDS.items():
        with torch.backends.mkldnn.flags(enabled=False):
            runner = make(make_runner(resolve_model("stories-draft")))
            drafter = SyncDrafter(runner, BLOCK, 256, 6, 64)
            temperature = 0.0 if down_weight is None else 0.8
            sampling = SamplingParams(seed=1, temperature=temperature, **OPTIONS[options])
            prompts = list(range(10, 30)), list(range(50, 61))
            sequences = [
                TargetSequence(i, prompt, [40], sampling, StopRules(100), None, [b"x"] * 512)
                for i, prompt in enumerate(prompts)
            ]
            for right in (4, 6, 0, 5):
                depths = (6, 3 if right == 6 else 6)
                pairs = zip(sequences, depths, strict=True)
                rows = [DraftRow(sequence, depth, down_weight) for sequence, depth in pairs]
                drafter.draft(rows)
                drafter.check_integrity()
                guesses.setdefault(kind, []).extend(row.tokens for row in rows)
                shipped = [whole_wire(row.wires) for row in rows if row.wires]
                wires.setdefault(kind, []).extend(shipped)
                for row in rows:
                    for token in [*row.tokens[:right], 77]:
                        row.sequence.commit(token)
            if kind == "in a chain":
                assert runner.deepened > 5
    assert guesses["host"] == guesses["device"] == guesses["in a chain"]
    assert {len(tokens) for tokens in guesses["host"]} == {3, 6}
    assert len(wires["host"]) == (0 if down_weight is None else 8)
    for kind in ("device", "in a chain"):
        assert all(map(torch.equal, wires["host"], wires[kind]))


class Watched(Ranking):
    """Also tells how wide the steps were that it was asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, chains=True)
        self.widths: list[int] = []

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> Any:
        self.widths.append(max(len(part.tokens) for part in parts))
        return super().step(parts, draws)


@pytest.mark.parametrize("certain", [[], [7], [7, 8, 9, 7, 8]], ids=len)
def test_what_others_have_committed_is_read_by_few_steps_and_certain_tokens_are_not_drafted(
    certain: list[int],
) -> None:
    """As under a grammar, whose tokens the draft model has not seen before."""
    guesses: dict[str, list[list[int]]] = {}
    widths: list[int] = []
    for kind, make in {"host": Host, "in a chain": Watched}.items():
        with torch.backends.mkldnn.flags(enabled=False):
            runner = make(make_runner(resolve_model("stories-draft")))
            drafter = SyncDrafter(runner, BLOCK, 256, 6, 64)
            sampling = SamplingParams(seed=1, temperature=0.0)
            sequences = [
                TargetSequence(i, prompt, [40], sampling, StopRules(100), None, [b"x"] * 512)
                for i, prompt in enumerate((list(range(10, 30)), list(range(50, 61))))
            ]
            for missing in ((0, 0), (1, 5), (7, 2), (3, 3), (1, 30)):
                for sequence, count in zip(sequences, missing, strict=True):
                    for token in range(100, 100 + count):
                        sequence.commit(token)
                rows = [DraftRow(each, 6, None, list(certain)) for each in sequences]
                if kind == "in a chain":
                    runner.widths.clear()
                drafter.draft(rows)
                drafter.check_integrity()
                assert all(row.tokens[: len(certain)] == certain for row in rows)
                guesses.setdefault(kind, []).extend(row.tokens for row in rows)
                little = max(missing) + len(certain) < STEPPED_ROWS
                if kind == "in a chain" and max(missing) and little:
                    widths += runner.widths
    assert guesses["host"] == guesses["in a chain"]
    assert {len(tokens) for tokens in guesses["host"]} == {6}
    assert max(widths, default=DRAFT_STEP_ROWS) == DRAFT_STEP_ROWS
