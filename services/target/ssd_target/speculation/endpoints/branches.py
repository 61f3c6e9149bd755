"""The speculation cache of one round: branches by the outcome that they continue.

Filled by an endpoint that may be slow, wrong or hostile: everything is checked, bounded and
append-only, and what is wrong is dropped.
"""

from ssd_engine.speculation.frames import Branch
from ssd_target.records.speculation_stats import LookUp

MAX_BRANCHES = 1024


class BranchStore:
    def __init__(self, length: int, max_depth: int, vocab_size: int) -> None:
        """``length`` of the speculation that the round verifies."""
        self._length, self._max_depth, self._vocab_size = length, max_depth, vocab_size
        self._branches: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._branches)

    def add(self, branch: Branch) -> bool:
        """False when it was dropped: out of bounds, or it leaves a gap. A repetition is no harm."""
        if branch.accepted > self._length or not self._valid([branch.token, *branch.tokens]):
            return False
        name = (branch.accepted, branch.token)
        known = self._branches.get(name)
        if known is None:
            if branch.start or len(self._branches) >= MAX_BRANCHES:
                return False
            known = self._branches[name] = []
        if branch.start > len(known):
            return False
        new = branch.tokens[len(known) - branch.start :]
        known += new[: self._max_depth - len(known)]
        return True

    def find(self, accepted: int, token: int) -> list[int]:
        """What continues this outcome; empty when nothing does (yet)."""
        return self._branches.get((accepted, token), [])

    def foreseen(self, accepted: int) -> list[int]:
        """Tokens that branches begin with after so many accepted ones."""
        return [token for length, token in self._branches if length == accepted]

    def look_up(self, accepted: int, token: int, wanted: int) -> LookUp:
        found = self._branches.get((accepted, token))
        if found is not None and len(found) >= wanted:
            return LookUp.HIT
        if found is not None or not self._branches:
            return LookUp.LATE
        if any(length == accepted for length, _ in self._branches):
            return LookUp.MISS_TOKEN
        return LookUp.MISS_LENGTH

    def check_integrity(self) -> None:
        for (accepted, token), tokens in self._branches.items():
            if accepted > self._length or len(tokens) > self._max_depth:
                raise RuntimeError("branch store integrity: a branch is out of bounds")
            if not self._valid([token, *tokens]):
                raise RuntimeError("branch store integrity: a token is not in the vocabulary")

    def _valid(self, tokens: list[int]) -> bool:
        return all(0 <= token < self._vocab_size for token in tokens)
