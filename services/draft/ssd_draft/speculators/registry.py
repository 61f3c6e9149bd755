"""The kinds of speculators, by the names of --speculator: a new one is a file, and a line here."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ssd_draft.config import DraftConfig, DraftEngineOptions
from ssd_engine.errors import ConfigError

if TYPE_CHECKING:  # a front, which checks options, loads no torch
    from ssd_draft.speculators.base import DraftRunner, Speculator


@dataclass(frozen=True)
class SpeculatorKind:
    module: str  # defines make_speculator(options, runner)
    needs_model: bool  # else it takes none


KINDS = {
    "model": SpeculatorKind("ssd_draft.speculators.model.speculator", needs_model=True),
    "ngram": SpeculatorKind("ssd_draft.speculators.ngram", needs_model=False),
}
_NO_MODEL = [name for name, kind in KINDS.items() if not kind.needs_model]
WITHOUT_MODEL = f"--speculator {' or '.join(_NO_MODEL)}"  # a remedy, in messages


def check_kind(config: DraftConfig) -> None:
    """Raises ConfigError unless a model is named exactly where the kind needs one."""
    needs_model = KINDS[config.speculator].needs_model
    if needs_model and config.model is None:
        raise ConfigError(f"MODEL is missing: name a draft model, or use {WITHOUT_MODEL}")
    if not needs_model and config.model is not None:
        raise ConfigError(f"--speculator {config.speculator} takes no MODEL, got {config.model!r}")


def make_speculator(options: DraftEngineOptions, runner: "DraftRunner | None") -> "Speculator":
    """``runner`` of the draft model, where the kind needs one."""
    module = import_module(KINDS[options.speculator].module)
    speculator: Speculator = module.make_speculator(options, runner)
    return speculator
