"""The tokens of a sequence so far, as drawing its next ones needs them. Plain data, no torch."""

from dataclasses import dataclass

from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The tokens that penalties and a grammar look at, and the options. ``output`` is the
    sequence's own list: it grows."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]  # committed
    grammar: GrammarFollower | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: list[int],
        output: list[int],
        grammar: GrammarFollower | None = None,
    ) -> "History | None":
        """A sequence's history; None where nothing asks for one."""
        needed = params.adjusts_logits or grammar is not None
        return cls(params, prompt, output, grammar) if needed else None
