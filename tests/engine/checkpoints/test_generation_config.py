"""A model's own sampling options, for requests that name none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd_engine.checkpoints.generation_config import (
    NEUTRAL,
    SamplingDefaults,
    load_sampling_defaults,
)
from ssd_engine.errors import ModelError

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5}


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_what_a_published_model_says(tmp_path: Path) -> None:
    defaults = load_sampling_defaults(write(tmp_path, QWEN3), 1000)
    expected = SamplingDefaults(float(np.float32(0.6)), 20, float(np.float32(0.95)))
    assert defaults == expected
    assert str(defaults) == "temperature 0.6, top_k 20, top_p 0.95, min_p 0, repetition_penalty 1"


@pytest.mark.parametrize("content", [{}, {"temperature": None, "eos_token_id": 3}, {"top_k": -1}])
def test_what_is_not_said_is_neutral(content: dict[str, Any], tmp_path: Path) -> None:
    """There may be no file, either."""
    assert load_sampling_defaults(tmp_path, 1000) == NEUTRAL
    assert load_sampling_defaults(write(tmp_path, content), 1000) == NEUTRAL


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"top_p": 1.5}, "top_p: must be in"),
        ({"top_p": "0.9"}, "top_p: must be a number, got '0.9'"),
        ({"top_k": 2.5}, "top_k: must be a whole number"),
        ({"top_k": 1e29}, "top_k: must be a number that a request could send, got 1e+29"),
        ({"top_k": 2**32}, "top_k: must be a number that a request could send"),
        ({"temperature": -1}, "temperature: must be"),
        ({"repetition_penalty": True}, "repetition_penalty: must be a number"),
        ([], "is not a JSON object"),
    ],
)
def test_what_is_wrong_is_named(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_sampling_defaults(write(tmp_path, content), 1000)
    assert f"{tmp_path / 'generation_config.json'}" in str(caught.value)
    assert words in str(caught.value)
