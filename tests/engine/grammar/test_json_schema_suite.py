"""The JSON Schema test suite: what it calls invalid is never written, and nothing is ignored."""

import pytest

from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.text.tokenizer import Tokenizer
from tools.json_schema_suite import Case, kept_groups, results

END = 1
CASES = 1245
OF_REFUSED_SCHEMAS = 656
WRITTEN = 330
FORMATS = [
    "email",
    "ipv4",
    "ipv6",
    "hostname",
    "uri",
    "uuid",
    "date",
    "date-time",
    "time",
    "duration",
]
# Valid values that are not written, for the reason at the beginning of their name.
NEVER_WRITTEN = {
    "properties in another order": {
        "allOf: allOf: allOf",
        "allOf: allOf with base schema: valid",
        "const: const with object: same object with different property order is valid",
    },
    "1.0 for 1": {
        "const: const with 0 does not match other zero-like types: float zero is valid",
        "const: const with 1 does not match true: float one is valid",
        "const: const with -2.0 matches integer and float types: float -2.0 is valid",
        "const: float and integers are equal up to 64-bit representation limits: float is valid",
        "enum: enum with 0 does not match false: float zero is valid",
        "enum: enum with [0] does not match [false]: [0.0] is valid",
        "enum: enum with 1 does not match true: float one is valid",
        "enum: enum with [1] does not match [true]: [1.0] is valid",
        "type: integer type matches integers: a float with zero fractional part is an integer",
    },
    "formats are held to": {
        f"format: {kind} format: invalid {kind} string is only an annotation by default"
        for kind in FORMATS
    },
}


@pytest.fixture(scope="module")
def cases(compiler: GrammarCompiler, tokenizer: Tokenizer) -> list[Case]:
    return list(results(kept_groups(), compiler, tokenizer, END))


def test_no_invalid_value_is_written(cases: list[Case]) -> None:
    assert len(cases) == CASES
    assert [case.name for case in cases if case.written and not case.valid] == []


def test_valid_values_are_written_but_for_those_that_are_known(cases: list[Case]) -> None:
    never = {case.name for case in cases if case.valid and case.written is False}
    assert never == set().union(*NEVER_WRITTEN.values())
    assert sum(case.valid and case.written is True for case in cases) == WRITTEN


def test_schemas_that_cannot_be_held_are_refused(cases: list[Case]) -> None:
    assert sum(case.written is None for case in cases) == OF_REFUSED_SCHEMAS
    for keyword in ("uniqueItems", "not", "contains", "dependentRequired", "unevaluatedItems"):
        told = {case.written for case in cases if case.name.startswith(f"{keyword}: ")}
        assert told == {None}
