"""Goodness of fit of texts: how likely they are if they come from a distribution that is known."""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_EXPECTED = 8  # of a cell in a chi-square test


def fit(cells: Ints, p: Floats) -> float:
    """p-value that draws of cells come from p: chi-square, cells of small expectation pooled."""
    counts = np.bincount(cells, minlength=p.size)
    if counts[p == 0].any():
        return 0.0  # what has no probability was drawn
    expected = p * cells.size
    pooled: list[tuple[float, float]] = [(0.0, 0.0)]
    for cell in np.argsort(expected):
        seen, due = pooled[-1]
        if due >= LEAST_EXPECTED:
            pooled.append((counts[cell], expected[cell]))
        else:
            pooled[-1] = (seen + counts[cell], due + expected[cell])
    return float(stats.chisquare(*zip(*pooled, strict=True)).pvalue)


def texts_fit(texts: Ints, probability: Floats, vocab: int, length: int) -> float:
    """The worst of several views, corrected for having been chosen: prefixes, places and pairs.

    Texts are numbers in base ``vocab``; ``probability`` is that of every one.
    """
    cells = np.arange(probability.size)
    views = [cells // vocab**i for i in range(length)]
    views += [cells // vocab**i % vocab for i in range(length - 1)]
    views += [cells // vocab**i % vocab**2 for i in range(length - 2)]
    results = [fit(view[texts], np.bincount(view, weights=probability)) for view in views]
    return min(1.0, min(results) * len(results))
