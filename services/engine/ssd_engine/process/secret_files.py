"""Files that hold secrets: keys, tokens, the secret of a cluster. No torch here."""

import contextlib
import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)

OPEN = stat.S_IROTH | stat.S_IWOTH


def warn_of_readers(flag: str, path: Path | None) -> None:
    """Say so where every user may read or write it. A group may: Secrets are mounted like that, for
    processes that are not root."""
    with contextlib.suppress(OSError):  # it is gone: whoever reads it says so
        if path is not None and path.stat().st_mode & OPEN:
            log.warning("%s: %s is open to every user: chmod o= %s", flag, path, path)
