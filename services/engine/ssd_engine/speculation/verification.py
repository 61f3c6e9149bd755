"""How a speculated token is judged."""

from enum import IntEnum


class Verification(IntEnum):
    COUPLED = 1  # it is right when it is the target's own sample
    REJECTION = 2  # it is accepted with min(1, p / sigma)
