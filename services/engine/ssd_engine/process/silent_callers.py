"""Callers who hold a place and have said nothing yet. No torch here.

There is room for a fixed number. One more takes the place of the oldest caller of the host that has
most of them: a caller with something to say says it at once, so that only the silent ones are old.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SilentCallers(Generic[Item]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._by_host: dict[Hashable, list[Item]] = {}  # oldest first

    def enter(self, host: Hashable, item: Item) -> Item | None:
        """Returns the one that has to go for it, if there is no room for both."""
        goes = None
        if sum(map(len, self._by_host.values())) >= self._most:
            fullest = max(self._by_host, key=lambda each: len(self._by_host[each]))
            goes = self._by_host[fullest][0]
            self.leave(fullest, goes)
        self._by_host.setdefault(host, []).append(item)
        return goes

    def leave(self, host: Hashable, item: Item) -> None:
        """One that is not there, or not any more, is no error."""
        held = self._by_host.get(host, [])
        if item in held:
            held.remove(item)
        if not held:
            self._by_host.pop(host, None)
