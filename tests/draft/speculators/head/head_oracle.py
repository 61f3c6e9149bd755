"""The definition of a head's text: rows in a line, branches one after the other, each by itself.

No trees, no slots that are moved, no path that turns back: a branch is drafted in a copy of the
text, row by row, and the copy of the one that is taken becomes the text.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.forward.batch import Chunk, KVCopy, slots_at
from tests.harness import BLOCK

BLOCKS = 12  # of each copy


@dataclass
class Line:
    """The rows of a text, and where they are."""

    place: int
    tokens: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> range:
        return range(self.place * BLOCKS, (self.place + 1) * BLOCKS)


class HeadOracle:
    """Its places: 0 and 1 have the text in turn, 2 a branch."""

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner
        self.text = Line(0)
        self._logits = torch.empty(0)

    def compute(
        self, line: Line, tokens: list[int], start: int, told: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, vocab] of rows from ``start`` on, the first ones of them told."""
        count = 0 if told is None else len(told)
        runs = [(tokens[:count], start, count), (tokens[count:], start + count, 0)]
        runs = [(some, first, many) for some, first, many in runs if some]
        parts = [Chunk(some, first, line.blocks, len(some)) for some, first, _ in runs]
        counts = [many for _, _, many in runs]
        given = GivenFeatures(counts, torch.empty(0) if told is None else told)
        result = self._runner.step_with_features(parts, [], given).result()
        line.tokens[start:] = tokens
        return result.logits

    def launch(
        self, committed: list[int], chain: list[int], begin: int, told: Tensor | None
    ) -> None:
        """A round begins: rows from ``begin`` on are computed, together."""
        text = [*committed[1:], *chain]
        logits = self.compute(self.text, text[begin:], begin, told)
        self._logits = logits[len(logits) - len(chain) - 1 :]
        self._length, self._chain = len(committed) - 1, chain

    def launch_patiently(
        self, committed: list[int], chain: list[int], begin: int, told: Tensor
    ) -> None:
        """The same, the chain row by row after what was told."""
        text = committed[1:]
        logits = [self.compute(self.text, text[begin:], begin, told)[-1:]]
        logits += [self.compute(self.text, [token], len(text) + i) for i, token in enumerate(chain)]
        self._logits = torch.cat(logits)
        self._length, self._chain = len(text), chain

    def foreseen(self, accepted: int, count: int) -> list[int]:
        """The likeliest tokens after so many of the chain."""
        best: list[int] = self._logits[accepted].topk(count + 1).indices.tolist()
        return [token for token in best if self._chain[accepted : accepted + 1] != [token]]

    def branch(self, accepted: int, token: int, depth: int) -> list[int]:
        """A branch's tokens, the likeliest ones; it lies in place 2 then."""
        length = self._length + accepted
        line = self._copy(self.text, Line(2), length)
        found: list[int] = []
        for i in range(depth):
            logits = self.compute(line, [found[-1] if i else token], length + i)
            found.append(int(logits[0].argmax()))
        self._branch = line
        return found

    def take(self, accepted: int, token: int, depth: int) -> list[int]:
        """The round ends in this outcome, whose branch of so many tokens is the next chain."""
        found = self.branch(accepted, token, depth)
        rows = self._length + accepted + depth
        self.text = self._copy(self._branch, Line(1 - self.text.place), rows)
        return found

    def _copy(self, line: Line, to: Line, rows: int) -> Line:
        if rows:
            sources = slots_at(line.blocks, range(rows), BLOCK)
            self._runner.forward([KVCopy(sources, 0, to.blocks)])
        to.tokens = line.tokens[:rows]
        return to
