"""How likely the tokens of prompts are, where a request asks for it, as a prefill computes them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.sampling.scoring import score_tokens
from ssd_target.scheduling.work import Work


class PromptScoring:
    """Takes the logits of one prefill's scored rows, a few at a time, and keeps only what is told
    of them."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = [work for work in works if work.chunk.num_scored]
        self._following = [token for work in self._works for token in _following(work)]
        self._top_n = max((work.sequence.prompt_logprobs or 0 for work in works), default=0)
        self._taken = 0  # rows
        self._lines: list[Tensor] = []

    def take(self, logits: Tensor) -> None:
        """The next rows [n, vocab], in the order of the chunks."""
        tokens = self._following[self._taken : self._taken + len(logits)]
        self._taken += len(tokens)
        self._lines.append(score_tokens(logits, tokens, self._top_n))

    def results(self) -> list[tuple[Work, NDArray[np.int32]]]:
        """Each piece of a prompt with the lines of its scored rows."""
        if not self._works:
            return []
        lines = torch.cat(self._lines).cpu().numpy()
        results, begin = [], 0
        for work in self._works:
            end = begin + work.chunk.num_scored
            results.append((work, _narrowed(lines[begin:end], work.sequence.prompt_logprobs or 0)))
            begin = end
        return results


def _following(work: Work) -> list[int]:
    begin = work.chunk.start + 1
    return work.sequence.prompt[begin : begin + work.chunk.num_scored]


def _narrowed(lines: NDArray[np.int32], top_n: int) -> NDArray[np.int32]:
    """Lines with the ``top_n`` likeliest tokens of a row, where there may be more."""
    middle = 1 + lines.shape[1] // 2
    return np.concatenate((lines[:, : 1 + top_n], lines[:, middle : middle + top_n]), axis=1)
