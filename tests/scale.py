"""Long checks run a fixed-seed tenth by default and the whole with SSD_TEST_FULL=1.

A test that only ``make test-full`` runs is marked ``@pytest.mark.full``.
"""

import os
from typing import Any

import pytest

FULL = os.environ.get("SSD_TEST_FULL", "") not in ("", "0")


def share(n: int) -> int:
    """n in full mode, a tenth of it otherwise; never none."""
    return n if FULL else max(1, n // 10)


def full_only(*values: Any) -> Any:
    """One set of parameters that only ``make test-full`` tries."""
    return pytest.param(*values, marks=pytest.mark.full)
