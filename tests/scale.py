"""Long checks run a fixed-seed tenth by default and the whole with SSD_TEST_FULL=1."""

import os

FULL = os.environ.get("SSD_TEST_FULL", "") not in ("", "0")


def share(n: int) -> int:
    """n in full mode, a tenth of it otherwise; never none."""
    return n if FULL else max(1, n // 10)
