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
from ssd_target.config import DRAFT_STEP_ROWS
from ssd_target.speculation.sync_drafter import STEPPED_ROWS, DraftRow, SyncDrafter
from tests.harness import BLOCK, make_runner
from tests.ranking_runner import Ranking
from tests.target.sequences import make_sequence

pytestmark = pytest.mark.usefixtures("as_in_the_services")

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


class Watched(Ranking):
    """Chains, and tells how wide the steps were that it was asked for."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, chains=True)
        self.widths: list[int] = []

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> Any:
        self.widths.append(max(len(part.tokens) for part in parts))
        return super().step(parts, draws)


KINDS: dict[str, Callable[[ModelRunner], Any]] = {
    "host": Host,
    "device": lambda runner: Ranking(runner, chains=False),
    "in a chain": Watched,
}


class Drafting:
    """Two sequences, and a draft model inside that guesses six tokens ahead."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.runner = KINDS[kind](make_runner(resolve_model("stories-draft")))
        self._drafter = SyncDrafter(self.runner, BLOCK, 256, 6, 64)
        sampling = SamplingParams(seed=1, **options)
        prompts = [*range(10, 30)], [*range(50, 61)]
        self.sequences = [
            make_sequence(i, prompt, generated=[40], sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]

    def draft(self, *rows: DraftRow) -> list[list[int]]:
        self._drafter.draft(list(rows))
        self._drafter.check_integrity()
        return [row.tokens for row in rows]


@pytest.mark.parametrize("down_weight", [None, 0.5], ids=["coupled", "rejection"])
@pytest.mark.parametrize("options", OPTIONS)
def test_guesses_are_the_same_wherever_they_are_drawn(
    options: str, down_weight: float | None
) -> None:
    """One of two sequences wants fewer; some guesses are right."""
    guesses: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    wires: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    temperature = 0.0 if down_weight is None else 0.8
    for kind in KINDS:
        drafting = Drafting(kind, temperature=temperature, **OPTIONS[options])
        for right in (4, 6, 0, 5):
            one, other = drafting.sequences
            fewer = DraftRow(other, 3 if right == 6 else 6, down_weight)
            rows = DraftRow(one, 6, down_weight), fewer
            guesses[kind] += drafting.draft(*rows)
            wires[kind] += [whole_wire(row.wires) for row in rows if row.wires]
            for row in rows:
                for token in [*row.tokens[:right], 77]:
                    row.sequence.commit(token)
        if kind == "in a chain":
            assert drafting.runner.deepened > 5
    assert guesses["host"] == guesses["device"] == guesses["in a chain"]
    assert {len(tokens) for tokens in guesses["host"]} == {3, 6}
    assert len(wires["host"]) == (0 if down_weight is None else 8)
    for kind in ("device", "in a chain"):
        assert all(map(torch.equal, wires["host"], wires[kind]))


@pytest.mark.parametrize("certain", [[], [7], [7, 8, 9, 7, 8]], ids=len)
def test_what_others_have_committed_is_read_by_few_steps_and_certain_tokens_are_not_drafted(
    certain: list[int],
) -> None:
    """As under a grammar, whose tokens the draft model has not seen before."""
    host, chained = (Drafting(kind, temperature=0.0) for kind in ("host", "in a chain"))
    for missing in ((0, 0), (1, 5), (7, 2), (3, 3), (1, 30)):
        chained.runner.widths.clear()
        guesses = []
        for drafting in (host, chained):
            for sequence, count in zip(drafting.sequences, missing, strict=True):
                for token in range(100, 100 + count):
                    sequence.commit(token)
            rows = [DraftRow(each, 6, None, list(certain)) for each in drafting.sequences]
            guesses.append(drafting.draft(*rows))
        assert guesses[0] == guesses[1]
        assert all(len(tokens) == 6 for tokens in guesses[0])
        assert all(tokens[: len(certain)] == certain for tokens in guesses[0])
        if max(missing) and max(missing) + len(certain) < STEPPED_ROWS:
            assert max(chained.runner.widths) == DRAFT_STEP_ROWS
