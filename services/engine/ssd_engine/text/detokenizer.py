"""From tokens to text, piece by piece: safe for UTF-8 and for stop strings. No torch here."""

import codecs
from collections.abc import Mapping, Sequence

from ssd_engine.text.stop_strings import StopMatcher


def spelled_out(token_bytes: Sequence[bytes], spellings: Mapping[int, bytes]) -> list[bytes]:
    """The bytes of each token, those of control tokens as they are written (``spellings``)."""
    return [spellings.get(token, spelled) for token, spelled in enumerate(token_bytes)]


class TextStream:
    """Text of a growing list of tokens.

    A token is a string of bytes; text is what their concatenation decodes to. Bytes are held
    back while they may be the beginning of a stop string, or of a character that is not complete.
    What has been released after n tokens depends on these tokens alone, so that a stream can be
    resumed by pushing them again.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        """``include_stop``: the text ends after a stop string. Then none of it is held back."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped_by: str | None = None
        self._stops = StopMatcher([s.encode() for s in stop_strings])
        self._include_stop = include_stop

    def push(self, token: int, may_stop: bool = True) -> str:
        """Text that this token decides. After a stop string there is no more; without ``may_stop``
        one that is complete with this token is text like any other."""
        if self.stopped_by is not None:
            return ""
        new = self._token_bytes[token]
        before = len(self._held)
        self._held += new
        match = self._stops.scan(new)
        while match is not None and not may_stop:
            new = new[match[0] :]
            match = self._stops.scan(new)
        if match is not None:
            end, stop = match
            self.stopped_by = stop.decode()
            self._held = self._held[: before + end - self._left_out(len(stop))]
            return self.flush()
        ready = len(self._held) - self._left_out(self._stops.pending)
        text = self._decoder.decode(self._held[:ready])
        self._held = self._held[ready:]
        return text

    def _left_out(self, stop_bytes: int) -> int:
        return 0 if self._include_stop else stop_bytes

    def flush(self, last: bytes = b"") -> str:
        """What is still held back, and ``last``, now that nothing follows."""
        text = self._decoder.decode(self._held + last, final=True)
        self._held = b""
        return text
