"""What does not fit on a device is an error at start that says what would."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import SHAPES, grow_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.execution.device_memory import (
    GIB,
    GRAPH_BYTES,
    blocks_on_device,
    check_weights_fit,
    needed_share,
    weight_bytes,
)
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step_shapes import step_shapes

CUDA = torch.device("cuda")
SMALL = load_model_config(resolve_model("stories-target"))


def options(**changes: object) -> RunnerOptions:
    settings: dict[str, object] = {
        "directory": Path(),
        "dtype": "bfloat16",
        "device": "cuda",
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_forward_tokens": 512,
        "step_rows": 6,
        **changes,
    }
    return RunnerOptions(**settings)  # type: ignore[arg-type]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, 70 of them free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_weights_are_counted_as_they_are() -> None:
    grown = grow_config(SMALL, SHAPES["llama-3.1-8b"])
    assert weight_bytes(grown, 1, torch.bfloat16) == pytest.approx(15e9, rel=0.01)
    assert weight_bytes(grown, 2, torch.bfloat16) > weight_bytes(grown, 1, torch.bfloat16) / 2


@pytest.mark.usefixtures("device")
def test_weights_that_do_not_fit_are_refused_with_the_ranks_that_would() -> None:
    check_weights_fit(grow_config(SMALL, SHAPES["qwen3-32b"]), options(), 1, torch.bfloat16, CUDA)
    big = grow_config(SMALL, SHAPES["llama-3.1-70b"])
    with pytest.raises(ConfigError) as caught:
        check_weights_fit(big, options(), 1, torch.bfloat16, CUDA)
    text = str(caught.value)
    assert re.search(
        r"weights take 1\d\d\.\d GiB on each device, 62\.0 GiB of 80\.0 are free", text
    )
    assert "--gpu-memory-utilization 0.9" in text
    ranks = int(re.findall(r"--tp (\d+) would fit", text)[0])
    check_weights_fit(big, options(), ranks, torch.bfloat16, CUDA)


@pytest.mark.usefixtures("device")
def test_blocks_take_what_is_left_within_the_share() -> None:
    blocks = blocks_on_device(options(), bytes_per_block=1 << 20, device=CUDA)
    assert blocks == (62 * GIB - GRAPH_BYTES) // (1 << 20)
    assert blocks_on_device(options(gpu_memory_utilization=0.1), 1 << 20, CUDA) == 0
    assert needed_share(options(gpu_memory_utilization=0.5), 8 * GIB, CUDA) == pytest.approx(0.6)


# Shapes of steps


def sizes(**changes: Any) -> list[tuple[int, int, int]]:
    return [(s.rows, s.runs, s.rows_per_run) for s in step_shapes(options(**changes))]


def test_a_server_has_shapes_for_the_rows_that_products_are_compiled_for() -> None:
    assert sizes() == [(8, 1, 6), (8, 8, 1), (32, 5, 6), (48, 8, 6)]
    assert sizes(max_num_seqs=32) == [
        (8, 1, 6), (8, 8, 1), (32, 5, 6), (32, 32, 1), (64, 10, 6), (128, 21, 6), (192, 32, 6),
    ]  # fmt: skip


@pytest.mark.parametrize("seqs", [1, 7, 64, 200])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_every_step_of_a_server_has_a_shape(seqs: int, rows: int) -> None:
    assert not sizes(step_rows=0)
    shapes = sizes(max_num_seqs=seqs, step_rows=rows)
    assert shapes == sorted(shapes)
    assert any(runs >= seqs and per_run >= rows for _, runs, per_run in shapes)
    assert all(runs * per_run <= total for total, runs, per_run in shapes)


def test_a_draft_has_shapes_for_trees_and_for_what_comes_before_them() -> None:
    shapes = step_shapes(
        options(exact=False, branches=24, max_tail=200, max_num_seqs=4, max_forward_tokens=256)
    )
    assert all(s.scratch == 200 and s.moves >= 7 for s in shapes)
    trees = [s for s in shapes if s.rows_per_run == 24]
    assert {(s.rows, s.runs) for s in trees} >= {(24, 1), (32, 2), (48, 2), (64, 4), (96, 4)}
    assert max(s.rows for s in shapes) <= 256


@pytest.mark.usefixtures("device")
def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    shared, big = options(devices=(0, 1, 0)), grow_config(SMALL, SHAPES["qwen3-32b"])
    for device, gib in ((torch.device("cuda", 0), 31), (torch.device("cuda", 1), 62)):
        assert blocks_on_device(shared, 1 << 20, device) == (gib * GIB - GRAPH_BYTES) // (1 << 20)
    with pytest.raises(ConfigError, match=r"31\.0 GiB of 80\.0 are free"):
        check_weights_fit(big, shared, 1, torch.bfloat16, torch.device("cuda", 0))
