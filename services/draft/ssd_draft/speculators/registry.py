"""The kinds of speculators, by the names of --speculator: a new one is a file, and a line here."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ssd_draft.config import DraftConfig, DraftEngineOptions
from ssd_engine.checkpoints.heads.head_config import is_head
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError

if TYPE_CHECKING:  # a front, which checks options, loads no torch
    from ssd_draft.speculators.base import DraftRunner, Speculator
    from ssd_engine.execution.head_runner import HeadRunner


@dataclass(frozen=True)
class SpeculatorKind:
    module: str  # defines make_speculator(options, runner)
    needs_model: bool  # else it takes none
    is_head: bool = False  # which its MODEL has to be; else that is a model


MODEL, HEAD = "model", "head"
KINDS = {
    MODEL: SpeculatorKind("ssd_draft.speculators.model.speculator", needs_model=True),
    HEAD: SpeculatorKind("ssd_draft.speculators.head.speculator", needs_model=True, is_head=True),
    "ngram": SpeculatorKind("ssd_draft.speculators.ngram", needs_model=False),
}
_NO_MODEL = [name for name, kind in KINDS.items() if not kind.needs_model]
WITHOUT_MODEL = f"--speculator {' or '.join(_NO_MODEL)}"  # a remedy, in messages


def kind_of(config: DraftConfig) -> str:
    """The kind that is asked for, or else the one that MODEL is.

    Raises ConfigError unless a model is named exactly where the kind needs one, and is of it.
    """
    name = config.speculator
    if name is not None and not KINDS[name].needs_model:
        if config.model is not None:
            raise ConfigError(f"--speculator {name} takes no MODEL, got {config.model!r}")
        return name
    if config.model is None:
        raise ConfigError(f"MODEL is missing: name a draft model, or use {WITHOUT_MODEL}")
    directory = resolve_model(config.model)
    found = is_head(directory)
    if name is None:
        return HEAD if found else MODEL
    if KINDS[name].is_head != found:
        what = "an EAGLE-3 head" if found else "a model"
        raise ConfigError(f"--speculator {name}: {directory} is {what}: leave out --speculator")
    return name


def make_speculator(
    options: DraftEngineOptions, runner: "DraftRunner | HeadRunner | None"
) -> "Speculator":
    """``runner`` of the draft model or head, where the kind needs one."""
    module = import_module(KINDS[options.speculator].module)
    speculator: Speculator = module.make_speculator(options, runner)
    return speculator
