"""How long a forward takes, learnt while running. No torch here."""

DECAY = 0.95  # weight of the past at each observation
MIN_SPREAD = 1e-6


class StepClock:
    """Seconds of a forward as a line over its rows: a decayed least-squares fit."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = self._rows2 = self._product = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    def observe(self, rows: int, seconds: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._rows = DECAY * self._rows + rows
        self._seconds = DECAY * self._seconds + seconds
        self._rows2 = DECAY * self._rows2 + rows * rows
        self._product = DECAY * self._product + rows * seconds

    def seconds(self, rows: int) -> float:
        """The estimate for so many rows; 0 before the first observation."""
        if not self.known:
            return 0.0
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows2 / self._weight - mean_rows**2
        if spread < MIN_SPREAD:
            return mean
        slope = (self._product / self._weight - mean_rows * mean) / spread
        # More rows never take less time, and a forward always takes some.
        slope = min(max(slope, 0.0), mean / max(mean_rows, 1.0))
        return max(mean + slope * (rows - mean_rows), 0.1 * mean)


class Average:
    """A decayed mean."""

    def __init__(self) -> None:
        self._weight = self._sum = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    def observe(self, value: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._sum = DECAY * self._sum + value

    def value(self, default: float = 0.0) -> float:
        return self._sum / self._weight if self.known else default
