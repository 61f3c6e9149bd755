"""What may meet at one place of a text, where parts of a schema hold together.

The library combines such parts before it compiles them. How much comes of that is told here from
above, without combining anything.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ssd_engine.grammar.json_schemas.multiples import Multiple, multiple_of
from ssd_engine.grammar.json_schemas.walk import DATA, DEFINITIONS, NAMED, References, mapping

ALTERNATIVES = ("anyOf", "oneOf")
BRANCHES_OF_OPTIONAL = 4
ANNOTATIONS = ("title", "description", "$comment", "deprecated", "readOnly", "writeOnly")
NOTES = ("$schema", "$anchor", "$id", "id", *ANNOTATIONS, *DATA[2:])
MOST_COUNTED = 1_000_000  # beyond all bounds; counts may double with each reference


class Combination(NamedTuple):
    """``patterns`` and ``alternatives`` are the most at any one place; ``multiples`` those of all
    places. ``branches`` are the ways to go on that the library's parser keeps at a time."""

    patterns: int = 0
    alternatives: int = 1
    branches: int = 0
    multiples: frozenset[Multiple] = frozenset()


NOTHING = Combination()


class Combinations:
    def __init__(self, schema: Any) -> None:
        self._references = References(schema)
        # By the part's id; of one that is being looked at nothing is known.
        self._known: dict[int, Combination] = {}

    def of(self, part: Any) -> Combination:
        """A part that leads to itself is counted once: the library combines it no further."""
        if not isinstance(part, Mapping):
            return _at_any([self.of(each) for each in part]) if isinstance(part, list) else NOTHING
        if id(part) not in self._known:
            self._known[id(part)] = NOTHING
            self._known[id(part)] = self._compute(part)
        return self._known[id(part)]

    def _compute(self, part: Mapping[str, Any]) -> Combination:
        together = [_own(part), self._inside(part)]
        together += [self.of(each) for each in _list(part.get("allOf"))]
        together += [
            _one_of([self.of(each) for each in _list(part[key])])
            for key in ALTERNATIVES
            if key in part
        ]
        if isinstance(reference := part.get("$ref"), str):
            together.append(self.of(self._references.target(reference)))
        return _all_of(together)

    def _inside(self, part: Mapping[str, Any]) -> Combination:
        """What values inside this one meet."""
        found = []
        for key, value in part.items():
            if key in NAMED:
                found += [self.of(each) for each in mapping(value).values()]
            elif key not in (*DATA, "allOf", *ALTERNATIVES):
                found.append(self.of(value))
        return _at_any(found)._replace(branches=0)


def combines(part: Mapping[str, Any]) -> bool:
    """Whether parts of this one hold together, or in place of each other."""
    lists = ("allOf", *ALTERNATIVES)
    if any(len(_list(part.get(key))) > 1 for key in lists):
        return True
    says = [key for key in part if key not in (*NOTES, *DEFINITIONS)]
    return len(says) > 1 and any(key in part for key in (*lists, "$ref"))


def _own(part: Mapping[str, Any]) -> Combination:
    values = part.get("enum")
    texts = isinstance(values, list) or "const" in part
    multiple = multiple_of(part.get("multipleOf"))
    return Combination(
        patterns=("pattern" in part) + ("format" in part) + texts,
        alternatives=max(1, len(_list(values))),
        branches=max(
            _branches(part), sum(isinstance(each, Mapping | list) for each in _list(values))
        ),
        multiples=frozenset() if multiple is None else frozenset([multiple]),
    )


def _branches(part: Mapping[str, Any]) -> int:
    required = {each for each in _list(part.get("required")) if isinstance(each, str)}
    optional = len(mapping(part.get("properties")).keys() - required)
    least, most = part.get("minProperties", 0), part.get("maxProperties")
    if most == len(required) + 1:
        return optional + 1
    if isinstance(least, int) and least > len(required):  # each that may come, with all others
        return optional * (optional + 1)
    return max(1, BRANCHES_OF_OPTIONAL * optional)


def _all_of(parts: list[Combination]) -> Combination:
    alternatives = 1
    for part in parts:
        alternatives = min(alternatives * part.alternatives, MOST_COUNTED)
    return Combination(
        min(sum(part.patterns for part in parts), MOST_COUNTED),
        alternatives,
        min(sum(part.branches for part in parts), MOST_COUNTED),
        frozenset().union(*(part.multiples for part in parts)),
    )


def _one_of(parts: list[Combination]) -> Combination:
    return _at_any(parts)._replace(
        alternatives=min(max(1, sum(part.alternatives for part in parts)), MOST_COUNTED),
        branches=min(sum(part.branches for part in parts), MOST_COUNTED),
    )


def _at_any(parts: list[Combination]) -> Combination:
    return Combination(
        max((part.patterns for part in parts), default=0),
        max((part.alternatives for part in parts), default=1),
        max((part.branches for part in parts), default=0),
        frozenset().union(*(part.multiples for part in parts)),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
