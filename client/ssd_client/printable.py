"""Text of others, fit for a terminal: nothing in it drives the terminal, or hides or reorders text.

Joiners (U+200C, U+200D) and variation selectors stay: emoji and many scripts need them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    return text.translate(_TABLE)


def printable_json(value: Any) -> Any:
    """What JSON can hold, with each text in it printable."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {name: printable_json(each) for name, each in value.items()}
        case list():
            return [printable_json(each) for each in value]
    return value


def _of(*ranges: tuple[int, int]) -> Iterable[int]:
    return (point for first, last in ranges for point in range(first, last + 1))


_CONTROLS = _of((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F))
_DIRECTIONS = _of((0x061C, 0x061C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069))
_LINES = _of((0x2028, 0x2029))  # few terminals show them as such
_UNSEEN = _of(
    (0x2061, 0x2065),  # operators of formulas
    (0x206A, 0x206F),  # deprecated
    (0x3164, 0x3164),  # fillers of Hangul
    (0xFFA0, 0xFFA0),
    (0xFFF9, 0xFFFB),  # annotations
    (0x1BCA0, 0x1BCA3),  # shorthand
    (0x1D173, 0x1D17A),  # music
    (0xE0000, 0xE007F),  # tags, which can hide whole sentences
)
# Where lines or words may or may not be broken, and returns: without them a text looks the same.
_DROPPED = (0x0D, 0x00AD, 0x034F, 0x180E, 0x200B, 0x2060, 0xFEFF)

_TABLE: dict[int, str | None] = {
    **dict.fromkeys((*_CONTROLS, *_DIRECTIONS, *_LINES, *_UNSEEN), _REPLACEMENT),
    **dict.fromkeys(_DROPPED),
}
