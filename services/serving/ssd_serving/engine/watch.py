"""Whether an engine makes progress: by what the front has heard of its loop, and when."""

from enum import Enum


class EngineState(Enum):
    MOVING = "moving"
    STALLED = "stalled"  # nothing can be served; it may go on
    DEAD = "dead"  # it will not


class EngineWatch:
    """The state of an engine, by how long it has been silent. Call ``look`` every ``interval``."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._looks = 0  # one after the other, at which it was silent for too long
        self.state = EngineState.MOVING

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(0.5, self._timeout / 4)

    def look(self, silent_seconds: float) -> EngineState:
        """Twice it must have been silent for too long: the front may have stood still itself, and
        have all to read that came meanwhile."""
        self._looks = self._looks + 1 if silent_seconds > self._timeout else 0
        if not self._looks:
            self.state = EngineState.MOVING
        elif silent_seconds > 2 * self._timeout and self.state is EngineState.STALLED:
            self.state = EngineState.DEAD
        elif self._looks > 1 and self.state is EngineState.MOVING:
            self.state = EngineState.STALLED
        return self.state
