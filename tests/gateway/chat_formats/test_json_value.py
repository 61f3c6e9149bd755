"""A JSON value is followed to its end, and broken where Python's own parser says so, too."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_gateway.chat_formats.json_value import BrokenJson, JsonValue
from tests.suite.scale import share


def ends_at(text: str) -> int | None:
    """Where the value ends; None: it has no end yet. Raises BrokenJson."""
    value = JsonValue()
    for place, char in enumerate(text):
        taken = value.push(char)
        if value.is_over:
            return place + taken
    return None


def python_says(text: str) -> int | None:
    """Where a complete value at the beginning of the text ends, by Python's parser."""
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except ValueError:
        return None


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.5e-3, "\\u00e9\\n", {}], "b": null}', "[]", ' "x"', "[true, false]"]
)
def test_a_value_ends_with_its_last_character(text: str) -> None:
    assert ends_at(text + "x") == len(text)
    assert ends_at(text[:-1]) is None


@pytest.mark.parametrize("text", ["1", "-0.5", "12e+3"])
def test_a_number_ends_before_what_follows(text: str) -> None:
    assert ends_at(text) is None
    assert ends_at(text + ",") == len(text)


CHARACTERS = st.sampled_from(list('{}[]":, \n\\u019-+.eEtruefalsn\x01é'))


@given(st.text(CHARACTERS, max_size=12))
@settings(max_examples=share(10_000), derandomize=True, deadline=None)
def test_it_agrees_with_python(text: str) -> None:
    text += " "  # ends a number
    try:
        end = ends_at(text)
    except BrokenJson:
        # Python takes the beginning of 1.x and of 01 for a number.
        assert python_says(text) is None or text.lstrip()[0] in "-0123456789"
    else:
        assert end is None or end == python_says(text)
