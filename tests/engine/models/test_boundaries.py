"""Boundary i of a target is what transformers calls the i-th hidden state."""

from pathlib import Path

import pytest
import torch

from ssd_engine.forward.batch import Chunk
from tests.harness import make_runner
from tests.random_models import make_model

TOKENS = list(range(3, 40))


@pytest.mark.parametrize("family", ["llama3-untied", "qwen3", "olmo2"])
def test_hidden_states_at_boundaries_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = make_model(family, tmp_path).eval()
    runner = make_runner(tmp_path)
    layers, last = runner.config.num_layers, []
    runner.watch(tuple(range(layers + 1)))
    runner.forward([Chunk(TOKENS, 0, list(range(3)), 1)])
    # transformers gives the last one after the final norm, which a boundary is before.
    norm = oracle.get_submodule("model.norm")
    norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        found = oracle(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    expected = torch.cat([each[0] for each in (*found[:layers], *last)], dim=-1)
    assert runner.features is not None
    assert (runner.features - expected).abs().max() < 1e-4
