"""A runner that ranks guesses by itself, as a GPU does, computed on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ssd_draft.planning.plan import RANKS
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Draw, KVCopy, Part, TreeRows
from ssd_engine.forward.result import ForwardResult
from ssd_engine.sampling.guesses import drawn_guesses
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import LIKELIEST, FewWeights
from ssd_engine.sampling.sampler import SampleRow, perturbed_scores
from tests.harness import BLOCK


class Ranking:
    """A runner that ranks by itself, as a GPU does; with ``chains`` it also follows itself.

    Without ``ranks`` it leaves that to others, as a CPU does."""

    def __init__(self, runner: ModelRunner, chains: bool, ranks: bool = True) -> None:
        self._runner, self.chains, self._ranks = runner, chains, ranks
        self.num_blocks = runner.num_blocks
        self._last: list[int] = []
        self.followed = 0
        self.launched: list[Ranked] = []
        self._said: tuple[list[Part], list[Draw | None]] = ([], [])
        self._resolved: list[Part] = []
        self.deepened = 0

    def deepen(
        self, flight: "Ranked", slots: Sequence[int], widths: Sequence[int]
    ) -> "Ranked | None":
        """By the definition: the step that would be said in full."""
        assert flight is self.launched[-1]
        parts, draws = self._said
        self.deepened += 1
        deeper: list[Part] = []
        row = 0
        for part in parts:
            own = slots[row : row + len(part.tokens)]
            tokens = [-(row + i) - 1 for i in range(len(own))]
            deeper.append(_deeper(part, tokens, own))
            row += len(own)
        given = [token for part in self._resolved for token in part.tokens]
        later = [
            None
            if draw is None
            else draw._replace(
                position=draw.position + 1,
                width=width,
                path=() if draw.history is None else (*draw.path, token),
            )
            for draw, width, token in zip(draws, widths, given, strict=True)
        ]
        return self.step(deeper, later)

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> "Ranked":
        self._said = list(parts), list(draws)
        resolved = self._resolved = [self._follow(part) for part in parts]
        logits = self._runner.forward(resolved)
        tokens = [
            part.tokens[: len(part.tokens) - part.num_logits + i + 1]
            for part in resolved
            for i in range(part.num_logits)
        ]
        rows = [
            _row_of(draw, before)
            for draw, before in zip(draws, tokens, strict=True)
            if draw is not None
        ]
        drawn = [draw for draw in draws if draw is not None]
        self.launched.append(self._scored(logits, drawn, rows))
        return self.launched[-1]

    def _scored(
        self, logits: Tensor | None, draws: Sequence[Draw], rows: Sequence[SampleRow]
    ) -> "Ranked":
        if logits is None or not self._ranks:
            return Ranked(ForwardResult(lambda: logits), 0)
        rejecting = [i for i, draw in enumerate(draws) if draw.width >= 0]
        scores = perturbed_scores(logits, rows).double()
        scores[rejecting] = logits[rejecting].double()
        best = scores.topk(RANKS + 1).indices.int().numpy()
        following, sigma = best[:, 0].copy(), None
        if rejecting:
            widths, weights = zip(*((d.width, d.down_weight) for d in draws), strict=True)
            tokens, wire = drawn_guesses(logits, rows, widths, weights)
            following[rejecting] = np.array(tokens)[rejecting]
            few = wire.float().topk(LIKELIEST)
            ids, values = few.indices.int().numpy(), few.values.numpy()
            sigma = FewWeights(ids, values, wire.shape[1], wire.device)
        self._last = following.tolist()
        return Ranked(ForwardResult(lambda: logits, best, following, sigma), len(best))

    def _follow(self, part: Part) -> Part:
        if isinstance(part, KVCopy) or min(part.tokens) >= 0:
            return part
        self.followed += 1
        return replace(part, tokens=[self._last[-t - 1] if t < 0 else t for t in part.tokens])


def _deeper(part: Part, tokens: list[int], slots: Sequence[int]) -> Part:
    if isinstance(part, Chunk):
        assert len(part.tokens) == part.num_logits == 1
        chunk = replace(part, tokens=tokens, start=part.start + 1)
        block = chunk.blocks[chunk.start // BLOCK]
        assert list(slots) == [block * BLOCK + chunk.start % BLOCK]
        return chunk
    assert isinstance(part, TreeRows)
    positions = [position + 1 for position in part.positions]
    scratch = [*part.scratch, *slots]
    return replace(part, tokens=tokens, positions=positions, slots=slots, scratch=scratch)


def _row_of(draw: Draw, tokens: Sequence[int]) -> SampleRow:
    """``tokens``: those of its run, up to its own."""
    names = ("seed", "temperature", "top_k", "top_p", "min_p")
    how: dict[str, Any] = {name: getattr(draw, name) for name in names}
    if (history := draw.history) is None:
        return SampleRow(SamplingParams(**how), (), range(draw.position))
    output = [*history.output, *draw.path, *tokens[len(tokens) - draw.recent :]]
    row = SampleRow(replace(history.params, **how), history.prompt, output)
    assert row.position == draw.position
    return row


class Ranked:
    def __init__(self, scored: ForwardResult, rows: int) -> None:
        self._scored, self.rows = scored, range(rows)
        self.seen = False

    def done(self) -> bool:
        return True

    def result(self) -> ForwardResult:
        self.seen = True
        return self._scored
