"""The memory of this host.

One line of /proc is read here rather than by psutil, which would be one more dependency of every
server for the same number.
"""

import logging
import os

log = logging.getLogger(__name__)


def available_memory() -> int:
    """Bytes that this machine can still give, the page cache not counted as taken."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        log.debug("no /proc/meminfo")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
