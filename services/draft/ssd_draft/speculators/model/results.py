"""Reads a forward's result: branches start after a chain, and all others get a token more."""

from collections import defaultdict
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_draft.speculators.model.row_group import RowGroup
from ssd_engine.forward.result import ForwardResult
from ssd_engine.sampling.guesses import best_of, drawn_guesses, ranked_guesses
from ssd_engine.sampling.sampler import SampleRow


def read_result(result: ForwardResult, groups: list[RowGroup]) -> None:
    """Chains need ranked guesses after each of their tokens, all others one token."""
    kinds: dict[tuple[bool, bool], list[RowGroup]] = defaultdict(list)
    for group in groups:
        kinds[group.is_chain, group.coupled].append(group)
    for (is_chain, coupled), alike in kinds.items():
        read = _start_branches if is_chain else _extend_coupled if coupled else _extend_drawn
        read(result, alike)


def _start_branches(result: ForwardResult, chains: list[RowGroup]) -> None:
    guesses = iter(_rankings(result, chains))
    for group in chains:
        group.state.start_branches(group.plan, list(islice(guesses, group.num_logits)))


def _extend_coupled(result: ForwardResult, groups: list[RowGroup]) -> None:
    """The best guess is the next token: it has the noise that the target's token will have."""
    if result.following is not None and all(group.chosen_by_device for group in groups):
        _extend_by_device(result, groups, result.following)
        return
    guesses = iter(_rankings(result, groups))
    for group in groups:
        rankings = list(islice(guesses, group.num_logits))
        group.state.extend(group.plan, [best_of(ranking) for ranking in rankings], rankings)


def _extend_drawn(result: ForwardResult, groups: list[RowGroup]) -> None:
    """Rejection: tokens are drawn from distributions, which are kept for the target."""
    if result.following is not None and result.sigma is not None:
        _extend_by_device(result, groups, result.following)
        return
    widths: list[int] = []
    weights: list[float] = []
    for group in groups:
        widths += [group.plan.width(group.drafting.depth)] * group.num_logits
        weights += [group.state.sequence.down_weight] * group.num_logits
    logits = _select(result.logits, groups)
    tokens, wire = drawn_guesses(logits, _sample_rows(groups), widths, weights)
    begin = 0
    for group in groups:
        end = begin + group.num_logits
        group.state.distributions.append(wire[begin:end])
        group.state.extend(group.plan, tokens[begin:end])
        begin = end


def _extend_by_device(
    result: ForwardResult, groups: list[RowGroup], following: NDArray[np.int32]
) -> None:
    """Takes the tokens that the device has drawn, and the guesses that it has ranked."""
    for group in groups:
        rows = group.rows
        if not group.coupled and result.sigma is not None:
            group.state.distributions.append(result.sigma[rows])
        ranked = None if result.best is None else result.best[rows]
        group.state.extend(group.plan, following[rows].tolist(), ranked)


def _rankings(result: ForwardResult, groups: list[RowGroup]) -> list[list[int]]:
    """The best guesses of every row, best first."""
    count = max(group.plan.ranks for group in groups)
    best = result.best
    if best is None or best.shape[1] < count:
        logits = _select(result.logits, groups)
        return ranked_guesses(logits, _sample_rows(groups), count, groups[0].coupled)
    found = best[groups[0].rows if len(groups) == 1 else _row_numbers(groups), :count]
    rankings: list[list[int]] = found.tolist()
    if (found[:, -1] < 0).any():  # fewer can be drawn at all
        return [[token for token in ranking if token >= 0] for ranking in rankings]
    return rankings


def _select(logits: Tensor, groups: list[RowGroup]) -> Tensor:
    rows = _row_numbers(groups)
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _sample_rows(groups: list[RowGroup]) -> list[SampleRow]:
    return [row for group in groups for row in group.sample_rows()]


def _row_numbers(groups: list[RowGroup]) -> list[int]:
    return [group.begin + i for group in groups for i in range(group.num_logits)]
