"""Finds the place inside a JSON schema that cannot be compiled, or not as it is meant."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ssd_engine.grammar.json_schemas.walk import DEFINITIONS, direct_parts, mapping

MOST_TRIALS, MOST_SECONDS = 200, 1.0


def find_place(schema: Any, problem: str, check: Callable[[Any], str]) -> tuple[str, str]:
    """The JSON pointer of the smallest part that is refused by itself, and why it is.

    ``check`` says what is wrong with a schema, or nothing.
    """
    place, trials, end = "", 0, time.monotonic() + MOST_SECONDS
    named = {key: schema[key] for key in DEFINITIONS if key in mapping(schema)}
    going = True
    while going:
        going = False
        for step, part in direct_parts(schema):
            if not isinstance(part, Mapping):
                continue
            trials += 1
            if trials > MOST_TRIALS or time.monotonic() > end:
                return place, problem
            if found := check({**named, **part}):
                place, problem, schema, going = place + step, found, part, True
                break
    return place, problem
