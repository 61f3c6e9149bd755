"""A draft's core with one link, told frame by frame; all that it pushes is one book of branches."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.base import Speculator
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Branches, DraftFrame, Open, TargetFrame, Verification
from ssd_engine.text.token_ids import pack_tokens

LINK, MAX_DEPTH = 1, 12


def opened(
    key: int = 1, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **changes: Any
) -> Open:
    fields: dict[str, Any] = {
        "sequence": key,
        "round": 0,
        "prompt": pack_tokens([*prompt]),
        "output": pack_tokens([*output]),
        "speculation": [],
        "max_tokens": 200,
        "sampling": SamplingParams(seed=key, temperature=0.0),
        "verification": Verification.COUPLED,
        "down_weight": 0.5,
        "depth": 4,
        "verify_micros": 0,
    }
    return Open(**{**fields, **changes})


class ToldDraft:
    def __init__(
        self,
        speculator: Speculator,
        make_planner: Callable[[int], Planner],
        clock: Callable[[], float] | None = None,
        **planes: Any,
    ) -> None:
        """Without a clock time hardly passes, but never stands still."""
        clock = clock or itertools.count(0.0, 1e-6).__next__
        self.core = DraftCore(speculator, make_planner, 8, None, 256, 64, clock=clock, **planes)
        self.core.handle(TargetLinkUp(LINK, MAX_DEPTH))
        self.pushed: dict[tuple[int, int, int, int], list[int]] = {}

    def sequence(self, key: int = 1) -> DraftSequence:
        return self.core._links[LINK].sequences[key]

    def send(self, *frames: TargetFrame) -> None:
        self.core.handle(TargetFrames(LINK, list(frames)))

    def step(self, times: int = 1) -> list[DraftFrame]:
        """What the draft says meanwhile."""
        said: list[DraftFrame] = []
        for _ in range(times):
            said += [frame for link in self.core.step().links for frame in link.frames]
            self.core.check_integrity()
        for frame in said:
            if isinstance(frame, Branches):
                self._book(frame)
        return said

    def settle(self, most: int = 200) -> None:
        """Until there is nothing to do."""
        for _ in range(most):
            self.step()
            if not self.core.has_work:
                return
        raise AssertionError("the draft never comes to rest")

    def _book(self, frame: Branches) -> None:
        for b in frame.branches:
            tokens = self.pushed.setdefault((frame.sequence, frame.round, b.accepted, b.token), [])
            assert b.start == len(tokens)
            tokens += b.tokens
