"""Whether a pipe between front and engine has something to read."""

import math
import select
from multiprocessing.connection import Connection

MOST_SELECTED = 1024  # files that select can watch


class PipePoll:
    """Whether a pipe has something to read, asked often: a Connection's own poll takes 20 times
    as long, as it makes a new selector each time."""

    def __init__(self, pipe: Connection) -> None:
        self._file = pipe.fileno()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def __call__(self, seconds: float | None) -> bool:
        if seconds and self._file < MOST_SELECTED:  # poll knows no parts of a millisecond
            return bool(select.select([self._file], (), (), seconds)[0])
        return bool(self._poll.poll(None if seconds is None else math.ceil(seconds * 1000)))
