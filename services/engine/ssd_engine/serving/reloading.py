"""Files that are read again whenever they change, and whose last good state is kept."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ssd_engine.errors import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Signature = tuple[tuple[int, ...], ...]


class Reloading(Generic[Value]):
    """What ``load`` makes of the files now.

    Looked at on every use: that costs a stat for each file, and needs no thread and no signal. A
    mounted Secret is exchanged by a link, which changes the file behind the name.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], Value],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """The first load may raise ConfigError; later ones keep what there is."""
        self._paths = paths
        self._load = load
        self._on_failure = on_failure
        self._seen = self._signature()
        self._value = load()
        self._failure = ""  # that was logged last

    def get(self) -> Value:
        return self.changed() or self._value

    def changed(self) -> Value | None:
        """The new value, if the files have changed into something good since the last look."""
        try:
            signature = self._signature()
            if signature == self._seen:
                return None
            self._seen = signature
            self._value = self._load()
        except (ConfigError, OSError) as error:
            self._fail(error)
            return None
        self._failure = ""
        log.info("read again: %s", ", ".join(map(str, self._paths)))
        return self._value

    def _fail(self, error: Exception) -> None:
        """Said once: whoever calls could fill the log."""
        if str(error) != self._failure:
            self._failure = str(error)
            self._on_failure()
            log.error("what was there before stays in use: %s", error)

    def _signature(self) -> Signature:
        stats = [os.stat(path) for path in self._paths]
        # The time of change, too: a file that could not be read may be let be read now.
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
