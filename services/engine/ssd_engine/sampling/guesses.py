"""A draft's guesses of what its target draws: pure functions of the draft's logits.

Coupled verification: the target draws argmax(log p + g) with noise g that the draft knows as
well, so the best guess is the argmax of the draft's own log q + g. The noise of all but the
likeliest tokens is left out: they hardly ever win, and a wrong guess costs time, never the text.

Filters (top-k, top-p, min-p) leave other tokens of the draft's than of the target's. The best guess
is the best of those that the draft's leave. Of the others, any may be among the target's: they are
guesses as well, of a lower score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.sampling.noise import STREAM_DRAFT, gumbel_of_rows, signed64
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import LIKELIEST, draft_distribution, draw_from, sigma_of
from ssd_engine.sampling.sampler import (
    NEVER,
    SampleRow,
    adjust_logits,
    argmax,
    scale_logits,
    warp_logits,
)

NO_GUESS = -1  # in place of a token

# What the score of a guess loses when the draft's filters leave it out, and what the best of those
# that they leave is raised by, so that it comes first.
FILTERED, FIRST = 1.0, 64.0


def sample_row(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    tail: Sequence[int],
    grammar: GrammarFollower | None = None,
) -> SampleRow:
    """The row after prompt, output and tail; only penalties and the sequence's grammar look at the
    tokens themselves."""
    allowed = None if grammar is None else grammar.allowed(output, tail)
    if allowed is not None and not allowed.any():
        allowed = None  # the text ends here: no guess is of use
    if params.penalised:
        return SampleRow(params, prompt, [*output, *tail], allowed)
    return SampleRow(params, (), range(len(prompt) + len(output) + len(tail)), allowed)


def ranked_guesses(
    logits: Tensor, rows: Sequence[SampleRow], count: int, coupled: bool = True
) -> list[list[int]]:
    """For each row of logits [n, vocab] the ``count`` best guesses, best first: fewer where a
    grammar allows fewer of those that the draft knows, or none.

    Not coupled: the target's noise is its own, and the likeliest tokens are the best guesses.
    """
    logits = adjust_logits(logits, rows)
    if not coupled or all(row.params.greedy for row in rows):
        if count == 1:
            first = torch.tensor(argmax(logits), device=logits.device)[:, None]
            return _possible(logits.gather(1, first), first)
        return _possible(*logits.topk(min(count, logits.shape[1])))
    tokens = logits.topk(min(max(count, LIKELIEST), logits.shape[1])).indices
    scores = _coupled_scores(logits, tokens, rows)
    best, order = scores.topk(min(count, scores.shape[1]))
    return _possible(best, tokens.gather(1, order))


def best_of(ranking: Sequence[int]) -> int:
    return ranking[0] if ranking else NO_GUESS


def _without_guess(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The rows where a head knows no token that may come."""
    held = [i for i, row in enumerate(rows) if row.allowed is not None or row.params.banned]
    if not held:
        return []
    best = adjust_logits(logits[held], [rows[i] for i in held]).amax(dim=1).tolist()
    return [row for row, highest in zip(held, best, strict=True) if highest == NEVER]


def _possible(scores: Tensor, tokens: Tensor) -> list[list[int]]:
    """The tokens [n, count], best first, that can be drawn at all."""
    rankings: list[list[int]] = tokens.tolist()
    if bool((scores[:, -1] > NEVER).all()):
        return rankings
    counts = (scores > NEVER).sum(dim=1).tolist()
    return [ranking[:n] for ranking, n in zip(rankings, counts, strict=True)]


def guess_scores(logits: Tensor, rows: Sequence[SampleRow], coupled: Sequence[bool]) -> Tensor:
    """What guesses are ranked by [n, vocab] float64; -inf for all but the likeliest tokens."""
    adjusted = adjust_logits(logits, rows)
    # Ties by the lower id, as the device has it.
    tokens = adjusted.sort(dim=-1, descending=True, stable=True).indices[:, :LIKELIEST]
    drawn = torch.tensor(
        [each and not row.params.greedy for each, row in zip(coupled, rows, strict=True)]
    )
    scores = torch.where(
        drawn.to(logits.device)[:, None],
        _coupled_scores(adjusted, tokens, rows),
        adjusted.gather(1, tokens).to(torch.float64),
    )
    return torch.full_like(logits, float("-inf"), dtype=torch.float64).scatter(1, tokens, scores)


def _coupled_scores(adjusted: Tensor, tokens: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """What these tokens of each row are ranked by: [n, tokens] float64."""
    params = [row.params for row in rows]
    scaled = scale_logits(adjusted.gather(1, tokens), params)
    scores = scaled.to(torch.float64) + _noise(tokens, rows)
    if not any(each.filters for each in params):
        return scores
    left = warp_logits(adjusted, params).gather(1, tokens) > float("-inf")
    first = scores.masked_fill(~left, float("-inf")).argmax(dim=1, keepdim=True)
    return torch.where(left, scores, scores - FILTERED).scatter_add(
        1, first, torch.full_like(first, FIRST, dtype=torch.float64)
    )


def drawn_guesses(
    logits: Tensor,
    rows: Sequence[SampleRow],
    fan_out: Sequence[int],
    down_weight: Sequence[float],
) -> tuple[list[int], Tensor]:
    """Rejection verification: tokens drawn from sigma, and sigma as it is shipped [n, vocab].
    NO_GUESS where nothing can be drawn; sigma is of no meaning there."""
    without = _without_guess(logits, rows)
    if without:
        logits = logits.index_fill(0, torch.tensor(without, device=logits.device), 0.0)
    wire = draft_distribution(logits, rows, fan_out, down_weight)
    seeds = torch.tensor([signed64(row.params.seed) for row in rows], device=logits.device)
    positions = torch.tensor([row.position for row in rows], device=logits.device)
    tokens: list[int] = draw_from(sigma_of(wire), seeds, positions, STREAM_DRAFT).tolist()
    for row in without:
        tokens[row] = NO_GUESS
    return tokens, wire


def _noise(tokens: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The noise [n, tokens]; 0 for greedy rows."""
    device = tokens.device
    seed = torch.tensor([signed64(row.params.seed) for row in rows], device=device)
    position = torch.tensor([row.position for row in rows], device=device)
    noise = gumbel_of_rows(seed, position, tokens)
    greedy = torch.tensor([row.params.greedy for row in rows], device=device)
    return noise.masked_fill_(greedy[:, None], 0.0)
