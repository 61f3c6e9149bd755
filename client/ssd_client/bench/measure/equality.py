"""Compares the texts of the modes: with coupled verification they are equal token for token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssd_client.bench.measure.settings import MODES, RunKey


@dataclass(frozen=True)
class Difference:
    prompt: int
    run: RunKey
    other: RunKey  # whose text is taken for right
    position: int  # index of the first token that differs
    token: int | None  # None: the text has ended
    expected: int | None


@dataclass(frozen=True)
class Equality:
    of: str  # the mode that all others are held against
    compared: int
    differences: list[Difference]

    def as_json(self) -> dict[str, Any]:
        return {
            "of": self.of,
            "compared": self.compared,
            "equal": self.compared - len({(d.prompt, d.run) for d in self.differences}),
            "differences": [asdict(difference) for difference in self.differences[:20]],
        }


def compare_texts(runs: Mapping[RunKey, Mapping[str, Any]]) -> Equality:
    """All runs of our modes against the first of them, plain decoding where there is one."""
    ours = sorted((key for key in runs if key.mode in MODES), key=_first_off)
    if not ours:
        return Equality("", 0, [])
    first = ours[0]
    right = {each["prompt"]: each["tokens"] for each in _good(runs[first])}
    compared, differences = 0, []
    for key in ours[1:]:
        for each in _good(runs[key]):
            expected = right.get(each["prompt"])
            if expected is None:
                continue
            compared += 1
            position = first_difference(each["tokens"], expected)
            if position is not None:
                found = (token_at(each["tokens"], position), token_at(expected, position))
                differences.append(Difference(each["prompt"], key, first, position, *found))
    return Equality(first.mode, compared, differences)


def first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """Where they part; None where they are equal."""
    for i, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return i
    return None if len(some) == len(others) else min(len(some), len(others))


def _first_off(key: RunKey) -> tuple[bool, RunKey]:
    return key.mode != "off", key


def _good(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in run["requests"] if each["error"] is None]


def token_at(tokens: Sequence[int], position: int) -> int | None:
    """The token at this place; None after the end."""
    return tokens[position] if position < len(tokens) else None
