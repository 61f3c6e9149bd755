"""Text of others in a terminal: what drives it, hides or reorders is shown as what it is."""

import unicodedata

import pytest

from ssd_client.printable import printable

REORDERING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    "character",
    [
        *REORDERING,
        *("\x00", "\x07", "\x1b", "\x7f", "\x9b"),
        *("\u2028", "\u2029", "\u2063", "\u206f", "\u3164", "\ufff9", "\U000e0001", "\U000e0041"),
    ],
)
def test_a_character_that_deceives_is_replaced(character: str) -> None:
    assert printable(f"a{character}b") == "a�b"


@pytest.mark.parametrize("character", ["\r", "\u00ad", "\u200b", "\u2060", "\ufeff"])
def test_a_character_without_a_look_is_left_out(character: str) -> None:
    assert printable(f"a{character}b") == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "two\n\tlines",
        "👩\u200d👩\u200d👧 ❤\ufe0f 🏳\ufe0f\u200d🌈",
        "می\u200cخواهم",  # Persian
        "क\u094d\u200dष",  # Devanagari
        "葛\U000e0100",
        "שלום, עולם — مرحبا 東京 naïve",
        "\u0661\u06dd",  # a sign of the Koran that is seen
    ],
)
def test_texts_of_all_scripts_stay(text: str) -> None:
    assert printable(text) == text


def test_no_other_character_changes_the_direction() -> None:
    controls = {
        chr(point)
        for point in range(0x110000)
        if unicodedata.bidirectional(chr(point))
        in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    }
    assert controls <= set(REORDERING)
    assert printable("".join(controls)) == "�" * len(controls)
