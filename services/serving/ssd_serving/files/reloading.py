"""Files that are read again whenever they change, and whose last good state is kept."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ssd_engine.errors import ConfigError, SSDError
from ssd_serving.files.descriptors import read_surely

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Signature = tuple[tuple[int, ...], ...]

CLOSE_SECONDS = 60.0  # files that cannot be read stand so long for what they said before


class Unreadable(ConfigError):
    """A file that is not there, or that cannot be opened now."""


class Outdated(SSDError):
    """What is known is too old to be relied on."""


class Reloading(Generic[Value]):
    """The value that ``load`` makes of some files, as they are now.

    Files are looked at on every use: it costs a stat for each, and needs no thread and no signal. A
    mounted Secret is exchanged by a link, which changes the file behind the name.

    Files that have changed into something bad leave what there was in use, and are said to be bad.
    Files that cannot be read are tried again at every use; after a while nobody knows what they
    say, and with ``closes`` there is no answer any more.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], Value],
        on_failure: Callable[[], None] = lambda: None,
        closes: bool = False,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first load may raise ConfigError; later ones keep what there is. ``on_change``: the
        files were read again."""
        self._paths, self._load, self._closes, self._now = paths, load, closes, clock
        self._on_failure, self._on_change = on_failure, on_change
        self._seen = self._signature()
        self._value = load()
        self._failure = ""  # the one that was logged last
        self._unread_since: float | None = None

    def get(self) -> Value:
        """The value; raises Outdated."""
        value = self.changed() or self._value
        since = self._unread_since
        if self._closes and since is not None and self._now() - since > CLOSE_SECONDS:
            names = ", ".join(map(str, self._paths))
            raise Outdated(f"{names}: unreadable for {CLOSE_SECONDS:g} s; nobody is let in")
        return value

    def changed(self) -> Value | None:
        """The new value, if the files have changed into something good since the last look."""
        try:
            signature = self._signature()
            if signature == self._seen:
                self._unread_since = None
                return None
            value = read_surely(self._load)
        except (Unreadable, OSError) as error:
            if self._unread_since is None:
                self._unread_since = self._now()
            self._fail(error)
            return None
        except ConfigError as error:
            self._seen, self._unread_since = signature, None
            self._fail(error)
            return None
        self._seen, self._value, self._unread_since, self._failure = signature, value, None, ""
        log.info("read again: %s", ", ".join(map(str, self._paths)))
        self._on_change()
        return value

    def _fail(self, error: Exception) -> None:
        """A failure is logged once: whoever calls could fill the log."""
        if str(error) != self._failure:
            self._failure = str(error)
            self._on_failure()
            log.error("what was there before stays in use: %s", error)

    def _signature(self) -> Signature:
        stats = [os.stat(path) for path in self._paths]
        # The time of change, too: a file that could not be read may be let be read now.
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
