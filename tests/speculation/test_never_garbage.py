"""A service whose arithmetic is wrong does not serve: real services, with real faults in them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.suite.scale import full_only

FAULTS = Path(__file__).parents[1] / "faults"
TARGET = ["ssd_target", "serve", "stories-target"]
DRAFT = ["ssd_draft", "serve", "stories-draft"]
SMALL = ["--max-num-seqs", "1", "--max-model-len", "256", "--prefill-chunk", "32", "--threads", "1"]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LIMIT_S = 240  # only a hang takes so long


def environment(fault: str) -> dict[str, str]:
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "SSD_TEST_FAULT": fault, "PYTHONPATH": path}


def serve(command: list[str], fault: str) -> subprocess.CompletedProcess[str]:
    """Until it ends by itself, as a service does that refuses to serve."""
    return subprocess.run(
        [sys.executable, "-m", *command, "--listen", "127.0.0.1:0"],
        env=environment(fault),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


ON_DEVICE = ["--device", "cuda", "--expand-to", "hidden=1024,heads=16,kv_heads=4,head_dim=64"]
ON_CPU = ["--device", "cpu", "--self-check"]


def on_gpu(*values: object) -> Any:
    """Without being asked: there the check is on."""
    skip = pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0")
    return pytest.param(ON_DEVICE, *values, marks=[pytest.mark.gpu, skip])


@pytest.mark.parametrize(
    ("flags", "command", "fault", "said"),
    [
        (
            ON_CPU,
            [*TARGET, "--depth", "3"],
            "product",
            ["layer 0, down product of a forward of 4 rows"],
        ),
        full_only(ON_CPU, [*TARGET, "--depth", "3"], "attention", ["attention of a prefill"]),
        full_only(
            ON_CPU, [*TARGET, "--tp", "2"], "rank", ["rank 1, layer 0, norm and gate-up product"]
        ),
        full_only(ON_CPU, DRAFT, "tree", ["layer 0, attention of a tree step"]),
        on_gpu(
            [*TARGET, "--depth", "12"],
            "step-product",
            ["layer 0, down product of a step of ", "--kernels torch"],
        ),
        on_gpu(TARGET, "step-attention", ["layer 0, attention of a step of ", "--kernels torch"]),
        on_gpu(DRAFT, "step-tree", ["layer 0, attention of a tree step of ", "--kernels torch"]),
        on_gpu(TARGET, "graph", ["captured graph of a step of ", "--eager"]),
    ],
)
def test_a_service_whose_arithmetic_is_wrong_does_not_start(
    flags: list[str], command: list[str], fault: str, said: list[str]
) -> None:
    done = serve([*command, *flags, *SMALL], fault)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for words in ("error: ", "self-check of stories-", *said, "--no-self-check"):
        assert words in last
    assert "ready" not in done.stderr
