"""Goodness of fit of texts: how likely they are if they come from a distribution that is known."""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_EXPECTED = 8  # of a cell in a chi-square test


def texts_fit(texts: Ints, probability: Floats, vocab: int, length: int) -> float:
    """The worst of several views, corrected for having been chosen: prefixes, places, pairs, and
    tokens wherever they stand.

    Texts are numbers in base ``vocab``; ``probability`` is that of every one.
    """
    cells = np.arange(probability.size)
    views = [cells // vocab**i for i in range(length)]
    views += [cells // vocab**i % vocab for i in range(length - 1)]
    views += [cells // vocab**i % vocab**2 for i in range(length - 2)]
    results = [fit(view[texts], np.bincount(view, weights=probability)) for view in views]
    results.append(tokens_fit(texts, probability, vocab, length))
    return min(1.0, min(results) * len(results))


def fit(cells: Ints, p: Floats, statistic: str = "pearson") -> float:
    """p-value that draws of cells come from p."""
    return chi_square(np.bincount(cells, minlength=p.size), p * cells.size, statistic)


def tokens_fit(texts: Ints, probability: Floats, vocab: int, length: int) -> float:
    """Every token against its probability after the text before it, added up over all places.

    What was due is itself a part of what was seen, so counts vary less than chi-square assumes:
    the p-value is too high, if anything.
    """
    counts, expected = np.zeros(vocab), np.zeros(vocab)
    for i in range(length):
        reach = probability.reshape(vocab**i, vocab, -1).sum(axis=2)
        after = reach / np.maximum(reach.sum(axis=1, keepdims=True), np.finfo(float).tiny)
        prefixes = texts // vocab ** (length - 1 - i)
        counts += np.bincount(prefixes % vocab, minlength=vocab)
        expected += after[prefixes // vocab].sum(axis=0)
    return chi_square(counts, expected)


def chi_square(counts: Ints | Floats, expected: Floats, statistic: str = "pearson") -> float:
    """Cells of small expectation are pooled."""
    if counts[expected == 0].any():
        return 0.0  # what has no probability was drawn
    pooled: list[tuple[float, float]] = [(0.0, 0.0)]
    for cell in np.argsort(expected):
        seen, due = pooled[-1]
        if due >= LEAST_EXPECTED:
            pooled.append((counts[cell], expected[cell]))
        else:
            pooled[-1] = (seen + counts[cell], due + expected[cell])
    if len(pooled) == 1:
        return 1.0  # one cell is left: nothing else was possible
    found = stats.power_divergence(*zip(*pooled, strict=True), lambda_=statistic)
    return float(found.pvalue)
