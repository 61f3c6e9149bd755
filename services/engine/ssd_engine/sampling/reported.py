"""Log probabilities as a device reports them, and as processes hand them on. No torch here."""

import numpy as np
from numpy.typing import NDArray

from ssd_engine.sampling.params import Logprobs


class ReportedLogprobs:
    """Log probabilities of rows: that of the drawn token, or a given one, then the n likeliest
    tokens (-1: there are no more), then theirs."""

    def __init__(self, lines: NDArray[np.int32]) -> None:
        """``lines`` [rows, 1 + 2 * n] are unpacked at once, as a round waits for them."""
        middle = 1 + lines.shape[1] // 2
        values = lines.view(np.float32)
        self._chosen: list[float] = values[:, 0].tolist()
        self._tokens: list[list[int]] = lines[:, 1:middle].tolist()
        self._values: list[list[float]] = values[:, middle:].tolist()

    def logprobs(self, row: int, top_n: int) -> Logprobs:
        tokens, values = self._tokens[row][:top_n], self._values[row]
        if -1 in tokens:
            tokens = tokens[: tokens.index(-1)]
        return Logprobs(self._chosen[row], tuple(zip(tokens, values, strict=False)))
