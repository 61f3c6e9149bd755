"""The tokens of a sequence so far, as drawing its next ones needs them. Plain data, no torch."""

from dataclasses import dataclass

from ssd_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The tokens that penalties look at, and the options. ``output`` is the sequence's own list: it
    grows."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]  # committed

    @classmethod
    def of(cls, params: SamplingParams, prompt: list[int], output: list[int]) -> "History | None":
        """A sequence's history; None where no option asks for one."""
        return cls(params, prompt, output) if params.adjusts_logits else None
