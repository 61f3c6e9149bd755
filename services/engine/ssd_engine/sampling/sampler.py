"""From logits to tokens: pure functions of logits, sampling options and history.

A token is argmax(log p + g): p the distribution after all sampling options, g the noise of
``noise.py``. Each row is computed from its own inputs alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ssd_engine.grammar.allowed import Allowed
from ssd_engine.sampling.noise import gumbel, gumbel_rows, signed64
from ssd_engine.sampling.params import Logprobs, SamplingParams

NEVER = float("-inf")
# Masses are added up as integers, in units of 2^-44 of the likeliest token's: the sum is the same
# in whatever order it is made, on every device, and holds a vocabulary of 2^18 tokens.
MASS_BITS = 44


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits needs to become a token."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Collection[int]  # everything after the prompt and before the token to be drawn
    allowed: Allowed | None = None  # by its grammar

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn."""
        return len(self.prompt) + len(self.output)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token for each row of logits [n, vocab] float32."""
    return argmax(perturbed_scores(logits, rows))


def argmax(scores: Tensor) -> list[int]:
    """The best token of each row [n, vocab]; on a CPU numpy is ten times as fast as torch."""
    if scores.device.type == "cpu":
        return scores.numpy().argmax(axis=1).tolist()
    return scores.argmax(dim=-1).tolist()


def perturbed_scores(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """log p + g up to a constant per row [n, vocab]; its argmax is the sample.

    Greedy rows carry no noise. A token that the options forbid is -inf.
    """
    logits = adjust_logits(logits, rows)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not random:
        return logits
    if len(random) == len(rows):
        return _noisy_scores(logits, rows)
    index = torch.tensor(random, device=logits.device)
    scores = logits.to(torch.float64)
    scores[index] = _noisy_scores(logits[index], [rows[i] for i in random])
    return scores


def target_distribution(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """p after all sampling options [n, vocab] float64; a greedy row is a point mass."""
    adjusted = adjust_logits(logits, rows)
    warped = warp_logits(adjusted, [row.params for row in rows])
    p = torch.softmax(warped.to(torch.float64), dim=-1)
    for i, row in enumerate(rows):
        if row.params.greedy:
            p[i] = torch.nn.functional.one_hot(adjusted[i].argmax(), p.shape[1])
    return p


def adjust_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logit bias, then penalties, then what is banned and what no grammar allows, where a row asks
    for them. The input stays as it is."""
    if not any(row.params.adjusts_logits or row.allowed is not None for row in rows):
        return logits
    out = logits.clone()
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            tokens, values = zip(*row.params.logit_bias, strict=True)
            out[i, list(tokens)] += torch.tensor(values, dtype=out.dtype, device=out.device)
        if row.params.penalised:
            _penalise(out[i], row)
        if row.position < row.params.banned_until:
            out[i, list(row.params.banned)] = NEVER
        if row.allowed is not None:
            left_out = np.unpackbits(row.allowed, count=out.shape[1], bitorder="little") == 0
            out[i, torch.from_numpy(left_out).to(out.device)] = NEVER
    return out


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """Penalises [vocab] in place: repetition over all tokens, the other two over output alone."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array([*row.prompt, *row.output], dtype=np.int64)))
        seen = seen.to(logits.device)
        value = logits[seen]
        # A tensor: by a number a CUDA device would not divide, but multiply with its inverse.
        penalty = torch.tensor(params.repetition_penalty, dtype=value.dtype, device=value.device)
        logits[seen] = torch.where(value > 0, value / penalty, value * penalty)
    if row.output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.array([*row.output], dtype=np.int64), return_counts=True)
        cost = params.presence_penalty + params.frequency_penalty * counts
        logits[torch.from_numpy(tokens).to(logits.device)] -= torch.from_numpy(cost).to(logits)


def warp_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, then top-k, top-p and min-p: forbidden tokens become -inf. [n, vocab].

    Rows at temperature 0 are divided by 1 and filtered alike; their argmax does not change.
    """
    scaled = scale_logits(logits, params)
    for i, p in enumerate(params):
        if p.filters:
            scaled = scaled.clone() if scaled is logits else scaled
            scaled[i] = scaled[i].masked_fill(~kept_tokens(scaled[i], p), NEVER)
    return scaled


def scale_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divides each row by its temperature, or by 1 where it is 0."""
    temperature = [1.0 if p.greedy else p.temperature for p in params]
    if all(t == 1.0 for t in temperature):
        return logits
    return logits / torch.tensor(temperature, dtype=logits.dtype, device=logits.device)[:, None]


def kept_tokens(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens survive top-k, top-p and min-p: [vocab] bool. Ties go to the lower id."""
    ordered, order = _ranking(scaled, params.top_k)
    keep = torch.ones(ordered.shape[0], dtype=torch.bool, device=scaled.device)
    if params.top_p < 1.0:
        mass = masses(ordered, ordered[0])
        reached = mass.cumsum(0)
        # A token stays when what is more likely than it does not yet reach top_p.
        keep &= (reached - mass).to(torch.float64) < params.top_p * reached[-1].to(torch.float64)
    if params.min_p > 0.0:
        keep &= ordered >= ordered[0] + float(np.log(params.min_p))
    kept = torch.zeros_like(scaled, dtype=torch.bool)
    kept[order[keep]] = True
    return kept


def masses(values: Tensor, highest: Tensor) -> Tensor:
    """Masses in units of 2^-MASS_BITS of the likeliest token's: int64."""
    share = (values.to(torch.float64) - highest.to(torch.float64)).exp()
    return (share * 2.0**MASS_BITS + 0.5).floor().to(torch.int64)


def _ranking(scaled: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k best values, or all for 0, in descending order, and their tokens."""
    if not top_k:
        return torch.sort(scaled, descending=True, stable=True)
    # Sorting only what reaches the k-th value: a sort of the vocabulary would dominate a step.
    worst = torch.topk(scaled, top_k).values[-1]
    tokens = (~(scaled < worst)).nonzero(as_tuple=True)[0]  # so NaN is no special case
    ordered, order = torch.sort(scaled[tokens], descending=True, stable=True)
    return ordered[:top_k], tokens[order[:top_k]]


def _noisy_scores(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Scores of rows at a temperature above 0: [n, vocab] float64."""
    params = [row.params for row in rows]
    warped = warp_logits(logits, params).to(torch.float64)
    device = logits.device
    seed = torch.tensor([signed64(p.seed) for p in params], device=device)
    position = torch.tensor([row.position for row in rows], device=device)
    if all(p.filters for p in params):
        # Few tokens are left: noise for these alone.
        row, token = warped.isfinite().nonzero(as_tuple=True)
        warped[row, token] += gumbel(seed[row], position[row], token)
        return warped
    return warped + gumbel_rows(seed, position, logits.shape[1])


def logprobs(logits: Tensor, tokens: Sequence[int], top_n: Sequence[int]) -> list[Logprobs]:
    """The model's own log probabilities, from logits [n, vocab] before any sampling option."""
    result = []
    for row, token, n in zip(logits.to(torch.float32), tokens, top_n, strict=True):
        highest = row.max()
        log_total = (masses(row, highest).sum().to(torch.float64) / 2.0**MASS_BITS).log()
        best, ids = _ranking(row, n) if n else (row[:0], row[:0])
        values = torch.cat((row[token : token + 1], best)).to(torch.float64)
        values = (values - highest.to(torch.float64) - log_total).to(torch.float32)
        chosen, *top = values.tolist()
        result.append(Logprobs(chosen, tuple(zip(ids.long().tolist(), top, strict=True))))
    return result
