"""Whether an endpoint pays: tokens per second with and without it, measured in alternation.

While on, a few rounds in many go plain, to know what plain is worth. When speculating is not worth
more, the endpoint is left for a while that doubles each time it fails its probe.
"""

from enum import Enum

from ssd_engine.pace import Average

FIRST_ROUNDS = 12  # with speculation, before the first verdict
PROBE_ROUNDS = 8
PLAIN_ROUNDS = 4
BETWEEN_PLAIN = 256  # rounds
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192  # rounds
GAIN = 1.02  # at least, to be on
MEMORY = 0.97


class Phase(Enum):
    ON = "on"
    PLAIN = "plain"  # on, but these rounds go without, to compare
    OFF = "off"


class Rate:
    """Tokens per second of a row, recent rounds counting more."""

    def __init__(self) -> None:
        self._tokens, self._seconds = Average(MEMORY), Average(MEMORY)
        self.rounds = 0

    def observe(self, tokens: int, seconds: float) -> None:
        self._tokens.observe(tokens)
        self._seconds.observe(seconds)
        self.rounds += 1

    @property
    def value(self) -> float:
        seconds = self._seconds.value()
        return self._tokens.value() / seconds if seconds else 0.0


class Payoff:
    """Rounds are observed one by one, of all sequences of an endpoint."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self.phase = Phase.ON
        self.with_it, self.without = Rate(), Rate()
        self._left = FIRST_ROUNDS  # rounds of this phase
        self._pause = FIRST_PAUSE

    @property
    def speculates(self) -> bool:
        return self.phase is Phase.ON

    @property
    def attaches(self) -> bool:
        """Whether sequences should be held at the endpoint."""
        return self.phase is not Phase.OFF

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        """A round of one row; its share of the step took ``row_seconds``.

        A round that was launched under another phase is no evidence for this one.
        """
        if not self._enabled or speculated != self.speculates:
            return
        (self.with_it if speculated else self.without).observe(tokens, row_seconds)
        self._left -= 1
        if self._left <= 0:
            self._next_phase()

    def _next_phase(self) -> None:
        if self.phase is Phase.OFF:
            self.with_it = Rate()  # what it was worth then says little about now
            self._enter(Phase.ON, PROBE_ROUNDS)
        elif self.phase is Phase.ON and self.without.rounds < PLAIN_ROUNDS:
            self._enter(Phase.PLAIN, PLAIN_ROUNDS)
        elif self.with_it.value < GAIN * self.without.value:
            self._enter(Phase.OFF, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.phase is Phase.ON:
            self._pause = FIRST_PAUSE
            self._enter(Phase.PLAIN, PLAIN_ROUNDS)
        else:
            self._enter(Phase.ON, BETWEEN_PLAIN)

    def _enter(self, phase: Phase, rounds: int) -> None:
        self.phase, self._left = phase, rounds
