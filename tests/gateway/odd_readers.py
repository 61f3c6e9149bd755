"""Ways to read a body that a test asks another process for."""

import os
import re
import resource
from pathlib import Path

from ssd_gateway.reading.prepared import Prepared, Terms

MIB = 1 << 20


def whoever_reads(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=os.getpid())


def greedy(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=len([bytes(MIB) for _ in range(4096)]))


def dying(body: bytes, terms: Terms) -> Prepared[int]:
    os._exit(1)


def tight(body: bytes, terms: Terms) -> Prepared[int]:
    """From here on the process has memory for small bodies alone."""
    told = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    most = (int(told[1]) << 10) + 16 * MIB if told else 0
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return Prepared(None, asked=most)


def size_of(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=len(body))
