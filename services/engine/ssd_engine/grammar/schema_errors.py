"""Finds the place inside a JSON schema that cannot be compiled, or not as it is meant."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords whose values are schemas, lists of schemas, or schemas by name.
ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MOST_TRIALS, MOST_SECONDS = 200, 1.0
LARGEST_EXACT = 2**53  # of whole numbers: beyond it a double leaves some out
DEFINITIONS = ("$defs", "definitions")


def find_place(schema: Any, problem: str, check: Callable[[Any], str]) -> tuple[str, str]:
    """The JSON pointer of the smallest part that is refused by itself, and why it is.

    ``check`` says what is wrong with a schema, or nothing.
    """
    place, trials, end = "", 0, time.monotonic() + MOST_SECONDS
    named = {key: schema[key] for key in DEFINITIONS if key in _mapping(schema)}
    going = True
    while going:
        going = False
        for step, part in _parts(schema):
            if not isinstance(part, Mapping):
                continue
            trials += 1
            if trials > MOST_TRIALS or time.monotonic() > end:
                return place, problem
            if found := check({**named, **part}):
                place, problem, schema, going = place + step, found, part, True
                break
    return place, problem


def find_large_number(schema: Any) -> str | None:
    """The place of a whole number that has more digits than the library keeps."""
    parts: list[tuple[str, Any]] = [("", schema)]
    while parts:
        place, part = parts.pop()
        if isinstance(part, Mapping):
            parts += [(f"{place}/{_escaped(name)}", value) for name, value in part.items()]
        elif isinstance(part, list):
            parts += [(f"{place}/{i}", value) for i, value in enumerate(part)]
        elif isinstance(part, int) and abs(part) > LARGEST_EXACT:
            return place
    return None


def _mapping(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its way there."""
    for key, value in _mapping(schema).items():
        if key in ONE:
            yield f"/{key}", value
        elif key in MANY and isinstance(value, list):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(value))
        elif key in NAMED:
            yield from (
                (f"/{key}/{_escaped(name)}", part) for name, part in _mapping(value).items()
            )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
