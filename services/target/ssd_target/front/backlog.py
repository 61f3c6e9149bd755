"""What a sequence has committed and its stream has not taken yet. No gRPC here.

A client that reads slowly lets it grow; the engine never waits. So it is bounded, in bytes.
"""

import asyncio

from ssd_engine.errors import SSDError
from ssd_target.records.engine_records import Delta

# In memory, about; objects of Python are not small.
DELTA_BYTES = 300
TOKEN_BYTES = 40
LOGPROBS_BYTES = 200
LOGPROB_BYTES = 120


class Backlog(asyncio.Queue[Delta | SSDError]):
    """Deltas in order; an error is the last thing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0  # in bytes

    def _put(self, item: Delta | SSDError) -> None:
        super()._put(item)
        self.size += size_of(item)

    def _get(self) -> Delta | SSDError:
        item: Delta | SSDError = super()._get()
        self.size -= size_of(item)
        return item

    @property
    def head(self) -> Delta | SSDError:
        """The next one; there must be one."""
        item: Delta | SSDError = self._queue[0]
        return item

    def replace(self, error: SSDError) -> None:
        """All is dropped; what is left to say is why."""
        while not self.empty():
            self.get_nowait()
        self.put_nowait(error)


def size_of(item: Delta | SSDError) -> int:
    if isinstance(item, SSDError):
        return 0
    logprobs = item.logprobs or ()
    tops = sum(len(each.top) for each in logprobs)
    return (
        DELTA_BYTES
        + TOKEN_BYTES * len(item.tokens)
        + LOGPROBS_BYTES * len(logprobs)
        + LOGPROB_BYTES * tops
        + len(item.prompt_scores)
    )
