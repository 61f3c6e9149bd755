"""How much work it takes to hold a number to ``multipleOf``: it grows with a whole number."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

# 20,000 takes a tenth of a second and 10 MiB, a million takes ten seconds and 400 MiB.
MAX_COEFFICIENT = 20_000
MAX_SUM = 100_000  # of different ones in one grammar: a second, and 60 MiB
_LIBRARY_WORD = 2**32  # beyond it the library computes a wrong common multiple
_MOST_DIGITS = 400  # of any double after its point


class Multiple(NamedTuple):
    """``coefficient`` times ten to the power of minus ``exponent``, as the library has it."""

    coefficient: int
    exponent: int

    @property
    def work(self) -> int:
        """A power of ten only asks for zeros."""
        whole = self.coefficient
        while whole > 1 and whole % 10 == 0:
            whole //= 10
        return 1 if whole <= 1 else self.coefficient


def multiple_of(value: Any) -> Multiple | None:
    """None for what the library refuses by itself."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    number, exponent = abs(float(value)), 0
    while number % 1 and exponent < _MOST_DIGITS:
        number, exponent = number * 10, exponent + 1
    return _reduced(int(number), exponent)


def common_multiple(multiples: Iterable[Multiple]) -> Multiple | None:
    """The least number that all of these divide; None where it is too large for the library."""
    numbers = list(multiples)
    exponent = max((each.exponent for each in numbers), default=0)
    scaled = [each.coefficient * 10 ** (exponent - each.exponent) for each in numbers]
    found = 1
    for each in scaled:
        if found * each >= _LIBRARY_WORD:
            return None
        found = math.lcm(found, each)
    return _reduced(found, exponent)


def _reduced(coefficient: int, exponent: int) -> Multiple:
    while exponent and coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent - 1
    return Multiple(coefficient, exponent)
