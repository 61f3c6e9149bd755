"""Whether a way to speculate pays: tokens per second with and without it, measured in alternation.

Two ways are judged so. An endpoint (mode ssd) is compared with what the target does without it;
the draft model inside the target (mode sync) is compared with plain rounds. While one is on, a few
rounds in many go without it, to know what these are worth. When it is not worth more, it is left
for a while that doubles each time it fails its probe.

A round gives one token or many: a dozen of them say little where two ways are nearly as fast. So a
comparison goes on until the difference is clear, or has been looked at for long enough, and one
that pays is left only for a clear one. What is far too slow is known after the first rounds.

What pays for one stream may not pay for sixteen: rates and verdicts are kept for each of a few
batch sizes.
"""

import math
from enum import Enum

# In rounds for each row of the batch size.
FIRST_ROUNDS = 12  # with speculation, before the first verdict
PROBE_ROUNDS = 8
PLAIN_ROUNDS = 4
BETWEEN_PLAIN = 256
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
LONGEST_TRIAL = 128  # rounds of looking more closely, at most
GAIN = 1.02  # at least, to be on
CLEAR = 1.0  # standard errors
MEMORY = 0.99

LARGEST_SIZE = 8  # batch sizes are told apart up to here: 1, 2 to 3, 4 to 7, 8 and more
STEADY_STEPS = 16  # steps of another batch size before its verdict is taken


class TrialPhase(Enum):
    ON = "on"
    PLAIN = "plain"  # on, but these rounds go without, to compare
    OFF = "off"


class Rate:
    """Tokens per second of a row, recent rounds counting more, and how well that is known."""

    def __init__(self) -> None:
        self._weight = self._squared_weight = 0.0
        self._sums = [0.0] * 5  # tokens, seconds, squares, and the product between these
        self.rounds = 0

    def observe(self, tokens: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._squared_weight = MEMORY**2 * self._squared_weight + 1
        new = (tokens, seconds, tokens * tokens, tokens * seconds, seconds * seconds)
        self._sums = [MEMORY * old + value for old, value in zip(self._sums, new, strict=True)]
        self.rounds += 1

    @property
    def value(self) -> float:
        tokens, seconds = self._sums[:2]
        return tokens / seconds if seconds else 0.0

    @property
    def error(self) -> float:
        """The standard error of a ratio of two means."""
        if self.rounds < 2:
            return math.inf
        _, seconds, tokens2, product, seconds2 = self._sums
        rate = self.value
        residual = max(0.0, tokens2 - 2 * rate * product + rate * rate * seconds2) / self._weight
        residual *= self.rounds / (self.rounds - 1)
        return math.sqrt(residual * self._squared_weight) / seconds if seconds else math.inf


class Comparison:
    """The comparison at one batch size, in phases. ``size``: its least number of rows."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.phase = TrialPhase.ON
        self.with_it, self.without = Rate(), Rate()
        self.verdict: bool | None = None  # whether it pays; None: not known yet
        self._left = FIRST_ROUNDS * size  # rounds of this phase
        self._trial = LONGEST_TRIAL * size  # rounds that are left to look more closely
        self._pause = FIRST_PAUSE

    @property
    def follows_verdict(self) -> bool:
        """Rounds go as the verdict says; in other phases they are there to compare."""
        return self.verdict is not None and self.verdict == (self.phase is TrialPhase.ON)

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        (self.with_it if speculated else self.without).observe(tokens, row_seconds)
        self._left -= 1
        if self._left <= 0:
            self._next_phase()

    def _next_phase(self) -> None:
        if self.phase is TrialPhase.OFF:
            self.with_it = Rate()  # what it was worth then says little about now
            self._trial = LONGEST_TRIAL * self._size
            self._enter(TrialPhase.ON, PROBE_ROUNDS)
        elif self.without.rounds < PLAIN_ROUNDS * self._size:
            self._enter(TrialPhase.PLAIN, PLAIN_ROUNDS)
        else:
            self._judge()

    def _judge(self) -> None:
        gain = self.with_it.value - GAIN * self.without.value
        error = math.hypot(self.with_it.error, GAIN * self.without.error)
        clear = abs(gain) >= CLEAR * error
        if not clear and self._trial > 0:
            self._look_more_closely()
        elif gain < 0 and (clear or not self.verdict):
            self.verdict = False
            self._enter(TrialPhase.OFF, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            self.verdict, self._pause = True, FIRST_PAUSE
            if self.phase is TrialPhase.ON:
                self._enter(TrialPhase.PLAIN, PLAIN_ROUNDS)
            else:
                self._trial = LONGEST_TRIAL * self._size
                self._enter(TrialPhase.ON, BETWEEN_PLAIN)

    def _look_more_closely(self) -> None:
        """At what is known less well."""
        phase = TrialPhase.ON if self.with_it.error > self.without.error else TrialPhase.PLAIN
        self._enter(phase, PROBE_ROUNDS)
        self._trial -= self._left

    def _enter(self, phase: TrialPhase, rounds: int) -> None:
        self.phase, self._left = phase, rounds * self._size


class Payoff:
    """Judges one endpoint, or the draft model, by the rounds of all its sequences, one by one."""

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
        if self._steps_elsewhere > STEADY_STEPS or not self.current.with_it.rounds:
            self._size, self._steps_elsewhere = size, 0
            self._by_size.setdefault(size, Comparison(size))

    @property
    def current(self) -> Comparison:
        return self._by_size[self._size]

    @property
    def phase(self) -> TrialPhase:
        return self.current.phase

    @property
    def speculates(self) -> bool:
        return self.phase is TrialPhase.ON

    @property
    def attaches(self) -> bool:
        """Whether sequences should be held at the endpoint."""
        return self.phase is not TrialPhase.OFF

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        """A round of one row; its share of the step took ``row_seconds``.

        A round that was launched under another phase, or in a batch of another size, is no evidence
        for this one.
        """
        if self._enabled and speculated == self.speculates and not self._steps_elsewhere:
            self.current.observe(speculated, tokens, row_seconds)

    def forget_without(self) -> None:
        """Rounds without it go another way from now on, at every batch size."""
        for comparison in self._by_size.values():
            comparison.without = Rate()
