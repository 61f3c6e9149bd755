"""From tokens to text, piece by piece: safe for UTF-8 and for stop strings. No torch here."""

import codecs
from bisect import bisect_left
from collections.abc import Sequence


class TextStream:
    """Text of a growing list of tokens.

    A token is a string of bytes; text is what their concatenation decodes to. Bytes are held
    back while they may be the beginning of a stop string, or of a character that is not complete.
    What has been released after n tokens depends on these tokens alone, so that a stream can be
    resumed by pushing them again.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop_strings: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped_by: str | None = None
        self._stops = [s.encode() for s in stop_strings]
        self._sorted_stops = sorted(self._stops)
        self._longest = max(map(len, self._stops), default=0)

    def push(self, token: int) -> str:
        """Text that this token decides. After a stop string there is no more."""
        if self.stopped_by is not None:
            return ""
        self._held += self._token_bytes[token]
        if (match := self._first_stop()) is not None:
            start, stop = match
            self.stopped_by = stop.decode()
            self._held = self._held[:start]
            return self.flush()
        keep = self._undecided()
        ready, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return self._decoder.decode(ready)

    def flush(self) -> str:
        """What is still held back, now that nothing follows."""
        text = self._decoder.decode(self._held, final=True)
        self._held = b""
        return text

    def _first_stop(self) -> tuple[int, bytes] | None:
        """The stop string that begins first in the held bytes, the first listed among equals."""
        found = [(at, i) for i, s in enumerate(self._stops) if (at := self._held.find(s)) >= 0]
        return (min(found)[0], self._stops[min(found)[1]]) if found else None

    def _undecided(self) -> int:
        """Length of the longest end of the held bytes that begins a stop string."""
        for n in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-n:]
            # In sorted order, what begins with ``end`` follows it without a gap.
            i = bisect_left(self._sorted_stops, end)
            if i < len(self._sorted_stops) and self._sorted_stops[i].startswith(end):
                return n
        return 0
