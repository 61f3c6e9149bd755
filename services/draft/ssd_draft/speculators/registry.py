"""The kinds of speculators, by the names of --speculator: a new one is a file, and a line here."""

from collections.abc import Callable

from ssd_draft.config import DraftEngineOptions
from ssd_draft.speculators.base import Speculator
from ssd_draft.speculators.model import DraftRunner, make_model_speculator
from ssd_draft.speculators.ngram import make_ngram_speculator

MakeSpeculator = Callable[[DraftEngineOptions, DraftRunner | None], Speculator]
KINDS: dict[str, MakeSpeculator] = {
    "model": make_model_speculator,
    "ngram": make_ngram_speculator,
}


def make_speculator(options: DraftEngineOptions, runner: DraftRunner | None) -> Speculator:
    """``runner``: of the draft model, where the kind has one."""
    return KINDS[options.speculator](options, runner)
