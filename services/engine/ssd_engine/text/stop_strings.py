"""Stop strings in a stream of bytes: an Aho-Corasick automaton (CACM 18(6), 1975).

A byte costs the same however many stop strings there are and however they overlap, so that no list
of stop strings can hold up those who share the server.
"""

from collections import deque
from collections.abc import Sequence

ROOT = 0


class StopMatcher:
    """Where in a stream the first stop string ends, and how much of its end may begin one."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._next: dict[int, int] = {}  # 256 * state + byte -> state
        self._fallback = [ROOT]  # the state of the longest shorter end that begins a stop string
        self._depth = [0]  # bytes that led to a state
        self._pending = [0]  # those that may lead further: of the state, or of one it falls back to
        self._ends: list[bytes | None] = [None]  # the longest stop string that ends in a state
        self._state = ROOT
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def pending(self) -> int:
        """Length of the longest end of the stream that begins a stop string."""
        return self._pending[self._state]

    def scan(self, data: bytes) -> tuple[int, bytes] | None:
        """Go on with the stream; the end, in ``data``, of the first stop string that ends there.

        Where several end with the same byte, it is the longest.
        """
        for i, byte in enumerate(data):
            self._state = self._step(self._state, byte)
            stop = self._ends[self._state]
            if stop is not None:
                return i + 1, stop
        return None

    def _step(self, state: int, byte: int) -> int:
        while True:
            following = self._next.get(256 * state + byte)
            if following is not None:
                return following
            if state == ROOT:
                return ROOT
            state = self._fallback[state]

    def _insert(self, stop: bytes) -> None:
        state = ROOT
        for byte in stop:
            key = 256 * state + byte
            if key not in self._next:
                self._next[key] = len(self._depth)
                self._depth.append(self._depth[state] + 1)
                self._pending.append(0)
                self._fallback.append(ROOT)
                self._ends.append(None)
            state = self._next[key]
        self._ends[state] = stop

    def _link(self) -> None:
        """Fallbacks in order of depth, so that a state's own are known before it is used."""
        children: dict[int, list[tuple[int, int]]] = {}
        for key, child in self._next.items():
            children.setdefault(key // 256, []).append((key % 256, child))
        queue = deque([ROOT])
        while queue:
            state = queue.popleft()
            for byte, child in children.get(state, ()):
                if state != ROOT:
                    self._fallback[child] = self._step(self._fallback[state], byte)
                if self._ends[child] is None:
                    self._ends[child] = self._ends[self._fallback[child]]
                fallback = self._pending[self._fallback[child]]
                self._pending[child] = self._depth[child] if child in children else fallback
                queue.append(child)
