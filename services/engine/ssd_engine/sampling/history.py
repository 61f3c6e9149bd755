"""What a sequence has said so far, for those who draw its next tokens. Plain data, no torch."""

from dataclasses import dataclass

from ssd_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Penalties look at it, and it has a bias. ``output`` is the sequence's own list: it grows."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]  # committed

    @classmethod
    def of(cls, params: SamplingParams, prompt: list[int], output: list[int]) -> "History | None":
        """None where no option asks for one."""
        return cls(params, prompt, output) if params.adjusts_logits else None
