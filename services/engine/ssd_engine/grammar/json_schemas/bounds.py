"""What in a JSON schema would take too much work, or cannot be kept, told before it is compiled.

The library bounds most of its own work. The rest is bounded here, by what was measured: a schema
within these bounds takes two seconds at most, and 200 MiB.
"""

from collections.abc import Mapping
from typing import Any

from ssd_engine.grammar.json_schemas.combinations import (
    BRANCHES_OF_OPTIONAL,
    Combination,
    Combinations,
    combines,
)
from ssd_engine.grammar.json_schemas.multiples import (
    MAX_COEFFICIENT,
    MAX_SUM,
    common_multiple,
    multiple_of,
)
from ssd_engine.grammar.json_schemas.walk import (
    Part,
    References,
    escaped,
    heights,
    leaves,
    mapping,
    parts,
)

LARGEST_EXACT = 2**53  # of whole numbers: beyond it a double leaves some out
MAX_DEPTH = 100  # the library reads 127 levels, some of which are its own
MAX_LEVELS = 5000  # of references that lead to each other: the library calls itself for each
MAX_TEXT = 8192  # characters that must come one after the other are looked at again and again
# The library's parser keeps 2,000 ways to go on. A property that may be left out takes four.
MAX_BRANCHES = 1940
MAX_PATTERNS_OF_NAMES = 64
MAX_PAIRS_OF_NAMES = 15_000  # each is compared whenever the object is combined with another one
MAX_PATTERNS_TOGETHER = 12  # beyond 15, time and memory double with each
MAX_ALTERNATIVES = 2000  # in which patterns come together


class Excess(Exception):
    def __init__(self, place: str, problem: str) -> None:
        super().__init__(problem)
        self.place, self.problem = place, problem


def check_bounds(schema: Any, used: set[int]) -> None:
    """Raises Excess. ``used``: coefficients of the same grammar's other schemas."""
    _check_depth(schema)
    found = list(parts(schema))
    _check_numbers(schema)
    for part in found:
        _check_texts(part)
        _check_object(part)
        _check_multiple(part, used)
    _check_references(schema)
    _check_names(found)
    _check_combinations(schema, found)


def _check_depth(schema: Any) -> None:
    row = [("", schema)]
    for _ in range(MAX_DEPTH):
        row = [
            (f"{place}/{escaped(str(key))}", inner)
            for place, value in row
            for key, inner in _items(value)
            if isinstance(inner, Mapping | list)
        ]
    if row:
        raise Excess(row[0][0], f"is nested too deeply: at most {MAX_DEPTH} levels")


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _check_numbers(schema: Any) -> None:
    for place, number in leaves("", schema):
        if isinstance(number, int) and abs(number) > LARGEST_EXACT:
            problem = "is beyond 2^53: texts cannot be held to a whole number as large as that"
            raise Excess(place, problem)


def _check_texts(part: Part) -> None:
    for key in ("const", "enum"):
        for place, value in leaves(f"{part.place}/{key}", part.schema.get(key)):
            if isinstance(value, str) and len(value) > MAX_TEXT:
                raise Excess(place, f"{len(value)} characters, at most {MAX_TEXT}")


def _check_object(part: Part) -> None:
    place, schema = part
    required = {each for each in _list(schema.get("required")) if isinstance(each, str)}
    least = schema.get("minProperties")
    least = least if isinstance(least, int) else 0
    if least > len(required) + 1:
        problem = (
            f"at most {len(required) + 1}, one more than the required names: a name that is "
            "written twice would count twice"
        )
        raise Excess(f"{place}/minProperties", problem)
    if len(mapping(schema.get("patternProperties"))) > MAX_PATTERNS_OF_NAMES:
        raise Excess(f"{place}/patternProperties", f"at most {MAX_PATTERNS_OF_NAMES}")


def _check_multiple(part: Part, used: set[int]) -> None:
    multiple = multiple_of(part.schema.get("multipleOf"))
    if multiple is None:
        return
    used.add(multiple.work)
    place = f"{part.place}/multipleOf"
    if multiple.work > MAX_COEFFICIENT:
        problem = f"{multiple.work} without its point: at most {MAX_COEFFICIENT}, or a power of ten"
        raise Excess(place, problem)
    if sum(used) > MAX_SUM:
        raise Excess(place, f"different ones add up to {sum(used)}, at most {MAX_SUM}")


def _check_references(schema: Any) -> None:
    levels_of = heights(schema)
    levels = sum(levels_of.get(id(target), 0) for target in References(schema).targets())
    if levels > MAX_LEVELS:
        raise Excess("", f"its references lead to {levels} levels, at most {MAX_LEVELS}")


def _check_names(found: list[Part]) -> None:
    """Patterns of names are compared with each other, so that no name is of two."""
    counts = [len(mapping(part.schema.get("patternProperties"))) for part in found]
    pairs = sum(count * (count - 1) // 2 for count in counts)
    merges = sum(
        len(_list(part.schema.get(key)))
        for part in found
        if combines(part.schema)
        for key in ("allOf", "anyOf", "oneOf")
    ) + sum("$ref" in part.schema and combines(part.schema) for part in found)
    if pairs * (1 + merges) > MAX_PAIRS_OF_NAMES:
        raise Excess("", "too many patternProperties that would have to be compared")


def _check_combinations(schema: Any, found: list[Part]) -> None:
    combinations = Combinations(schema)
    for place, part in found:
        combination = combinations.of(part)
        if combination.branches > MAX_BRANCHES:
            problem = (
                f"{combination.branches} ways to go on, at most {MAX_BRANCHES}: each property "
                f"that is not required takes {BRANCHES_OF_OPTIONAL}"
            )
            raise Excess(place, problem)
        if combines(part):
            _check_combination(place, combination)


def _check_combination(place: str, combination: Combination) -> None:
    patterns, alternatives = combination.patterns, combination.alternatives
    if patterns > MAX_PATTERNS_TOGETHER:
        problem = f"{patterns} patterns may come together, at most {MAX_PATTERNS_TOGETHER}"
        raise Excess(place, problem)
    if patterns > 1 and alternatives > MAX_ALTERNATIVES:
        problem = f"{alternatives} alternatives with patterns, at most {MAX_ALTERNATIVES}"
        raise Excess(place, problem)
    common = common_multiple(combination.multiples)
    if common is None or common.work > MAX_COEFFICIENT:
        problem = (
            "the common multiple of what is under multipleOf is too large: at most "
            f"{MAX_COEFFICIENT} without its point"
        )
        raise Excess(place, problem)


def names_may_be_escaped(schema: Any) -> bool:
    """Whether a name could be written a second time with escapes, where its own rule does not
    reach it: the library compares names as they are written."""
    for _, part in parts(schema):
        names = part.get("properties") or part.get("required")
        patterns = part.get("patternProperties")
        if (names and patterns) or ((names or patterns) and not _is_closed(part)):
            return True
    return False


def _is_closed(part: Mapping[str, Any]) -> bool:
    return part.get("additionalProperties") is False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
