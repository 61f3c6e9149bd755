"""Between two depths of a tree the draft's engine is silent, and loses nothing of what it saw."""

import pytest

from ssd_draft.engine.core import DraftCore
from ssd_draft.engine.engine_process import SILENCE_SECONDS, OutputCoalescer
from ssd_draft.planning.plan import Planner
from ssd_draft.records import DraftOutput, LinkOutput
from ssd_draft.speculators.ngram import NgramSpeculator
from ssd_engine.speculation.frames import Load
from ssd_engine.tracing.events import TraceEventKind, make_trace


class Working(DraftCore):
    """Has work for some steps; says something in those that are named."""

    def __init__(self, steps: int, says: set[int]) -> None:
        super().__init__(NgramSpeculator(), lambda depth: Planner(depth, 4), 1, None, 8, 8)
        self.left, self.number, self._says = steps, 0, says
        self._events = make_trace(True)

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> DraftOutput:
        self.left, self.number = self.left - 1, self.number + 1
        self._events.moment(TraceEventKind.PUSH, sequence=self.number, round=0, tokens=1)
        links = [LinkOutput(1, [], 1)] if self.number in self._says else []
        return DraftOutput(links, Load(open_sequences=0), self.stats(), self._events.take())


def spoken(core: Working, seconds: float) -> dict[int, list[int]]:
    """The steps that are told, each with those whose traces come with it."""
    now = 0.0
    engine = OutputCoalescer(core, clock=lambda: now)
    told: dict[int, list[int]] = {}
    while engine.has_work:
        now += seconds
        output = engine.step()
        if output is not None:
            told[core.number] = [event.sequence for event in output.trace]
    return told


@pytest.mark.parametrize(
    ("says", "seconds"), [({3}, 0.0), (set(), SILENCE_SECONDS / 2.5)], ids=["said", "silence"]
)
def test_it_speaks_when_it_has_something_to_say_after_a_silence_and_when_it_is_done(
    says: set[int], seconds: float
) -> None:
    assert spoken(Working(6, says), seconds) == {3: [1, 2, 3], 6: [4, 5, 6]}
