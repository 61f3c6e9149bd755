"""Sampling defaults from a model's ``generation_config.json``, for requests that set none. No torch
here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssd_engine.checkpoints.files.model_files import is_integer, is_there, read_object, shown
from ssd_engine.errors import InputError, ModelError
from ssd_engine.sampling.params import SamplingParams, check_sampling

FILE = "generation_config.json"
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """The defaults of sampling options: neutral, unless a model says otherwise."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.options().items())


NEUTRAL = SamplingDefaults()


def load_sampling_defaults(directory: Path, vocab_size: int) -> SamplingDefaults:
    """``do_sample`` counts for nothing, as with other servers: a temperature of 0 is greedy."""
    path = directory / FILE
    if not is_there(path):
        return NEUTRAL
    content = read_object(path)
    given = {name: content[name] for name in OPTIONS if content.get(name) is not None}
    try:
        numbers = {name: _number(name, each) for name, each in given.items()}
        if "top_k" in numbers:  # more than there are are all of them
            numbers["top_k"] = min(numbers["top_k"], vocab_size)
        defaults = SamplingDefaults(**numbers)
        check_sampling(SamplingParams(0, **defaults.options()), vocab_size)
    except InputError as error:
        raise ModelError(f"{path}: {str(error).removeprefix('sampling.')}") from None
    return defaults


def _number(name: str, value: Any) -> Any:
    """As a request would send it: a number that is named has the same bits."""
    if not (is_integer(value) or isinstance(value, float)):
        raise InputError(name, f"must be a number, got {shown(value)}")
    if not abs(value) < (2**32 if name == "top_k" else 1e30):
        raise InputError(name, f"must be a number that a request could send, got {shown(value)}")
    if name != "top_k":
        return float(np.float32(value))
    if value != int(value):
        raise InputError(name, f"must be a whole number, got {shown(value)}")
    return max(0, int(value))  # -1 is another way to say: all
