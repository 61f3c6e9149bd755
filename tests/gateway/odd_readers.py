"""Ways to read a body that a test asks another process for."""

import os

from ssd_gateway.reading.prepared import Prepared, Terms

MIB = 1 << 20


def whoever_reads(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=os.getpid())


def greedy(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=len([bytes(MIB) for _ in range(4096)]))


def dying(body: bytes, terms: Terms) -> Prepared[int]:
    os._exit(1)


def size_of(body: bytes, terms: Terms) -> Prepared[int]:
    return Prepared(None, asked=len(body))
