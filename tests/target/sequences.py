"""Sequences of a target's engine, as tests need them."""

from collections.abc import Sequence as Tokens
from typing import Any

from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.completion import StopRules
from ssd_target.records.speculation_options import SpeculationRequest
from ssd_target.scheduling.sequence import Sequence

VOCAB = 512
SEED_0 = SamplingParams(seed=0)
NO_END = StopRules(1 << 19)


def make_sequence(
    number: int,
    prompt: list[int],
    rules: StopRules = NO_END,
    generated: Tokens[int] = (),
    sampling: SamplingParams = SEED_0,
    num_logprobs: int | None = None,
    owner: str = "",
    **speculation: Any,
) -> Sequence:
    """``speculation``: of its request, which names nothing else."""
    table = [b"x"] * VOCAB
    sequence = Sequence(number, prompt, [*generated], sampling, rules, num_logprobs, table, owner)
    if speculation:
        sequence.speculation = SpeculationRequest(**speculation)
    return sequence
