"""Whether a way to speculate pays: tokens per second with and without it, measured in alternation.

Two ways are judged so. An endpoint (mode ssd) is compared with what the target does without it;
the draft model inside the target (mode sync) is compared with plain rounds. While one is on, a few
rounds in many go without it, to know what these are worth. When it is not worth more, it is left
for a while that doubles each time it fails its probe.

What pays for one stream may not pay for sixteen: rates and verdicts are kept for each of a few
batch sizes.
"""

from enum import Enum

from ssd_engine.pace import Average

# In rounds for each row of the batch size.
FIRST_ROUNDS = 12  # with speculation, before the first verdict
PROBE_ROUNDS = 8
PLAIN_ROUNDS = 4
BETWEEN_PLAIN = 256
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
GAIN = 1.02  # at least, to be on
MEMORY = 0.97

LARGEST_SIZE = 8  # batch sizes are told apart up to here: 1, 2 to 3, 4 to 7, 8 and more
STEADY_STEPS = 16  # of another batch size, before its verdict is taken


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


class Comparison:
    """The phases of one batch size. ``size``: its least number of rows."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.phase = Phase.ON
        self.with_it, self.without = Rate(), Rate()
        self.verdict: bool | None = None  # whether it pays; None: not known yet
        self._left = FIRST_ROUNDS * size  # rounds of this phase
        self._pause = FIRST_PAUSE

    @property
    def begun(self) -> bool:
        return self.with_it.rounds > 0

    @property
    def follows_verdict(self) -> bool:
        """Rounds go as the verdict says; in other phases they are there to compare."""
        return self.verdict is not None and self.verdict == (self.phase is Phase.ON)

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        (self.with_it if speculated else self.without).observe(tokens, row_seconds)
        self._left -= 1
        if self._left <= 0:
            self._next_phase()

    def _next_phase(self) -> None:
        if self.phase is Phase.OFF:
            self.with_it = Rate()  # what it was worth then says little about now
            self._enter(Phase.ON, PROBE_ROUNDS)
        elif self.phase is Phase.ON and self.without.rounds < PLAIN_ROUNDS * self._size:
            self._enter(Phase.PLAIN, PLAIN_ROUNDS)
        elif self.with_it.value < GAIN * self.without.value:
            self.verdict = False
            self._enter(Phase.OFF, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self.phase is Phase.ON:
            self.verdict, self._pause = True, FIRST_PAUSE
            self._enter(Phase.PLAIN, PLAIN_ROUNDS)
        else:
            self.verdict = True
            self._enter(Phase.ON, BETWEEN_PLAIN)

    def _enter(self, phase: Phase, rounds: int) -> None:
        self.phase, self._left = phase, rounds * self._size


class Payoff:
    """Rounds are observed one by one, of all sequences that the endpoint or the draft model has."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._size = 1  # the batch size whose verdict is taken
        self._by_size = {1: Comparison(1)}
        self._steps_elsewhere = 0  # the last ones, all of other batch sizes

    def about_to_run(self, num_rows: int) -> None:
        """The next forward has so many rows."""
        if not self._enabled:
            return
        size = min(1 << (num_rows.bit_length() - 1), LARGEST_SIZE)
        if size == self._size:
            self._steps_elsewhere = 0
            return
        self._steps_elsewhere += 1
        if self._steps_elsewhere > STEADY_STEPS or not self._current.begun:
            self._size, self._steps_elsewhere = size, 0
            self._by_size.setdefault(size, Comparison(size))

    @property
    def _current(self) -> Comparison:
        return self._by_size[self._size]

    @property
    def phase(self) -> Phase:
        return self._current.phase

    @property
    def with_it(self) -> Rate:
        return self._current.with_it

    @property
    def without(self) -> Rate:
        return self._current.without

    @property
    def verdict(self) -> bool | None:
        return self._current.verdict

    @property
    def follows_verdict(self) -> bool:
        return self._current.follows_verdict

    @property
    def speculates(self) -> bool:
        return self.phase is Phase.ON

    @property
    def attaches(self) -> bool:
        """Whether sequences should be held at the endpoint."""
        return self.phase is not Phase.OFF

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        """A round of one row; its share of the step took ``row_seconds``.

        A round that was launched under another phase, or in a batch of another size, is no evidence
        for this one.
        """
        if self._enabled and speculated == self.speculates and not self._steps_elsewhere:
            self._current.observe(speculated, tokens, row_seconds)

    def forget_without(self) -> None:
        """Rounds without it go another way from now on."""
        self._current.without = Rate()
