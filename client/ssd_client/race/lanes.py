"""The lanes of a race: who runs, how each of them did, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ssd_client.bench.measure.equality import first_difference
from ssd_client.bench.measure.settings import MODES
from ssd_client.generate.events import Tokens
from ssd_client.generate.result import GenerationResult
from ssd_client.generate.speculation import SpeculationStats, served_otherwise


@dataclass(frozen=True)
class Lane:
    mode: str
    where: str = ""  # what computes, in words; empty: what the target has
    title: str = ""  # empty: the mode

    @property
    def name(self) -> str:
        return self.title or self.mode


@dataclass(eq=False)
class Run:
    """A lane, and the text that it has told so far."""

    lane: Lane
    state: str = ""  # while there is no text
    pieces: list[tuple[str, str]] = field(default_factory=list)  # text, and where it came from
    result: GenerationResult | None = None

    def take(self, tokens: Tokens) -> None:
        told = "".join(tokens.pieces) == tokens.text and len(tokens.origins) == len(tokens.pieces)
        if told:
            self.pieces += zip(tokens.pieces, tokens.origins, strict=True)
        else:  # a server that does not say it
            self.pieces.append((tokens.text, ""))

    @property
    def token_ids(self) -> list[int]:
        return self.result.token_ids if self.result else []

    @property
    def rate(self) -> float | None:
        """Tokens per second, after the first."""
        return self.result.timing.tokens_per_s(len(self.token_ids)) if self.result else None

    @property
    def done(self) -> bool:
        return self.result is not None and self.result.finished is not None

    @property
    def speculation(self) -> SpeculationStats | None:
        return self.result.speculation if self.result else None

    def as_json(self) -> dict[str, Any]:
        stats = self.speculation
        return {
            "mode": self.lane.mode,
            "where": self.lane.where,
            "tokens": len(self.token_ids),
            "tokens_per_s": self.rate,
            "speculation": asdict(stats) if stats else None,
        }


def verdict(runs: Sequence[Run]) -> str:
    """By how much the last of the modes is faster than each other one, and whether texts differ."""
    return " · ".join(part for part in (_speeds(runs), equality(runs), _otherwise(runs)) if part)


def _speeds(runs: Sequence[Run]) -> str:
    fast = max(runs, key=lambda run: MODES.index(run.lane.mode))
    others = [run for run in runs if run is not fast and run.rate]
    if not fast.rate or not others:
        return ""
    ratios = [f"{fast.rate / run.rate:.1f} × as fast as {run.lane.name}" for run in others
              if run.rate]  # fmt: skip
    return f"{fast.lane.name}: {', '.join(ratios)}"


def _otherwise(runs: Sequence[Run]) -> str:
    """A mode that a target has left for a faster one must not pass for itself."""
    told = [served_otherwise(run.lane.mode, None, run.speculation) for run in runs
            if run.speculation]  # fmt: skip
    return ", ".join(filter(None, told))


def equality(runs: Sequence[Run]) -> str:
    different = differing(runs)
    if different is not None:
        first, other, position = different
        return f"the texts of {first.lane.name} and {other.lane.name} DIFFER at token {position}"
    return f"all {len(runs)} texts are equal, token for token" if len(runs) > 1 else ""


def differing(runs: Sequence[Run]) -> tuple[Run, Run, int] | None:
    """The first that tells something else than the first of all, and where."""
    for other in runs[1:]:
        position = first_difference(runs[0].token_ids, other.token_ids)
        if position is not None:
            return runs[0], other, position
    return None
