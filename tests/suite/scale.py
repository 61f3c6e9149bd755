"""Long checks run a fixed-seed thirtieth by default and the whole with SSD_TEST_FULL=1.

A test that only ``make test-full`` runs is marked ``@pytest.mark.full``.
"""

import os
from typing import Any

import pytest

SHARE = 30
FULL = os.environ.get("SSD_TEST_FULL", "") not in ("", "0")


def share(n: int, least: int = 1) -> int:
    """n in full mode, a thirtieth of it otherwise, but not less than ``least``."""
    return n if FULL else max(least, n // SHARE)


def full_only(*values: Any) -> Any:
    """One set of parameters that only ``make test-full`` tries."""
    return pytest.param(*values, marks=pytest.mark.full)
