"""Reads a forward's result: branches start after a chain, and all others get a token more."""

from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_draft.speculators.model.draws import sample_rows
from ssd_draft.speculators.model.row_group import RowGroup
from ssd_engine.forward.result import ForwardResult
from ssd_engine.sampling.guesses import drawn_guesses, ranked_guesses


def read_result(result: ForwardResult, groups: list[RowGroup]) -> None:
    """Chains need ranked guesses after each of their tokens, all others one token."""
    chains = [group for group in groups if group.is_chain]
    others = [group for group in groups if not group.is_chain]
    for coupled in (True, False):
        _start_branches(result, [group for group in chains if group.coupled is coupled], coupled)
    _extend_coupled(result, [group for group in others if group.coupled])
    _extend_drawn(result, [group for group in others if not group.coupled])


def _start_branches(result: ForwardResult, chains: list[RowGroup], coupled: bool) -> None:
    if not chains:
        return
    guesses = iter(_rankings(result, chains, coupled))
    for group in chains:
        group.state.start_branches(group.plan, list(islice(guesses, group.part.num_logits)))


def _extend_coupled(result: ForwardResult, groups: list[RowGroup]) -> None:
    """The best guess is the next token: it has the noise that the target's token will have."""
    if not groups:
        return
    if result.following is not None and all(group.chosen_by_device for group in groups):
        _extend_by_device(result, groups, result.following)
        return
    guesses = iter(_rankings(result, groups, coupled=True))
    for group in groups:
        rankings = list(islice(guesses, group.part.num_logits))
        group.state.extend(group.plan, [ranking[0] for ranking in rankings], rankings)


def _extend_drawn(result: ForwardResult, groups: list[RowGroup]) -> None:
    """Rejection: tokens are drawn from distributions, which are kept for the target."""
    if not groups:
        return
    if result.following is not None and result.sigma is not None:
        _extend_by_device(result, groups, result.following)
        return
    widths: list[int] = []
    weights: list[float] = []
    for group in groups:
        widths += [group.plan.width(group.drafting.depth)] * group.part.num_logits
        weights += [group.state.sequence.down_weight] * group.part.num_logits
    logits = _select(result.logits, groups)
    tokens, wire = drawn_guesses(logits, sample_rows(groups), widths, weights)
    begin = 0
    for group in groups:
        end = begin + group.part.num_logits
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


def _rankings(result: ForwardResult, groups: list[RowGroup], coupled: bool) -> list[list[int]]:
    """The best guesses of every row, best first."""
    count = max(group.plan.ranks for group in groups)
    best = result.best
    if best is None or best.shape[1] < count:
        logits = _select(result.logits, groups)
        return ranked_guesses(logits, sample_rows(groups), count, coupled)
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


def _row_numbers(groups: list[RowGroup]) -> list[int]:
    return [group.begin + i for group in groups for i in range(group.part.num_logits)]
