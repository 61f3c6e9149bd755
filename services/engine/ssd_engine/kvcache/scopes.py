"""Who finds what is cached: tokens of one scope are never found from another. No torch here."""

from collections.abc import Callable
from typing import Generic, TypeVar

MOST_SCOPES = 4096  # so many are remembered

Name = TypeVar("Name")


class Scopes(Generic[Name]):
    """Roots of a block pool, by what callers name their scopes; names may be anybody's choice, so
    the least recently used are forgotten, and with them what is cached under their roots."""

    def __init__(self, new_root: Callable[[], int]) -> None:
        self._new_root = new_root
        self._roots: dict[Name, int] = {}

    def root_of(self, name: Name) -> int:
        root = self._roots.pop(name, None)
        if root is None:
            root = self._new_root()
            if len(self._roots) >= MOST_SCOPES:
                del self._roots[next(iter(self._roots))]
        self._roots[name] = root
        return root
