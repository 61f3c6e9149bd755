"""From tokens to text, piece by piece: safe for UTF-8 and for stop strings. No torch here."""

import codecs
import re
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
        stops = [s.encode() for s in stop_strings]
        self._pattern = re.compile(b"|".join(map(re.escape, stops))) if stops else None
        self._beginnings = {s[:n] for s in stops for n in range(1, len(s))}
        self._longest = max(map(len, stops), default=0)

    def push(self, token: int) -> str:
        """Text that this token decides. After a stop string there is no more."""
        if self.stopped_by is not None:
            return ""
        self._held += self._token_bytes[token]
        if self._pattern is not None and (match := self._pattern.search(self._held)):
            self.stopped_by = match.group().decode()
            self._held = self._held[: match.start()]
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

    def _undecided(self) -> int:
        """Length of the longest end of the held bytes that begins a stop string."""
        for n in range(min(self._longest - 1, len(self._held)), 0, -1):
            if self._held[-n:] in self._beginnings:
                return n
        return 0
