"""A service whose arithmetic is wrong does not serve: real services, with real faults in them."""

import os
import subprocess
import sys
from pathlib import Path

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


def check_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for words in ("error: ", "self-check of stories-", *said, "--no-self-check"):
        assert words in last
    assert "ready" not in done.stderr


@pytest.mark.parametrize(
    ("command", "fault", "said"),
    [
        (
            [*TARGET, "--depth", "3"],
            "product",
            ("layer 0, down product of a forward of 4 rows",),
        ),
        full_only([*TARGET, "--depth", "3"], "attention", ("layer 0, attention of a prefill",)),
        full_only([*TARGET, "--tp", "2"], "rank", ("rank 1, layer 0, norm and gate-up product",)),
        full_only(DRAFT, "tree", ("layer 0, attention of a tree step",)),
    ],
    ids=["product", "attention", "one-rank-of-two", "tree"],
)
def test_a_service_whose_arithmetic_is_wrong_does_not_start(
    command: list[str], fault: str, said: tuple[str, ...]
) -> None:
    flags = ["--device", "cpu", "--self-check", *SMALL]
    check_refused(serve([*command, *flags], fault), *said)


ON_DEVICE = ["--device", "cuda", "--expand-to", "hidden=1024,heads=16,kv_heads=4,head_dim=64"]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0")
@pytest.mark.parametrize(
    ("command", "fault", "said"),
    [
        (
            [*TARGET, "--depth", "12"],
            "step-product",
            ("layer 0, down product of a step of ", "--kernels torch"),
        ),
        (TARGET, "step-attention", ("layer 0, attention of a step of ", "--kernels torch")),
        (DRAFT, "step-tree", ("layer 0, attention of a tree step of ", "--kernels torch")),
        (TARGET, "graph", ("captured graph of a step of ", "--eager")),
    ],
    ids=["product", "attention", "tree", "graph"],
)
def test_a_gpu_service_whose_kernels_are_wrong_does_not_start(
    command: list[str], fault: str, said: tuple[str, ...]
) -> None:
    """Without being asked: on a GPU the check is on."""
    check_refused(serve([*command, *ON_DEVICE, *SMALL], fault), *said)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of compute capability 9.0")
def test_the_option_that_is_named_avoids_the_fault() -> None:
    flags = [*ON_DEVICE, *SMALL, "--kernels", "torch", "--drain-timeout", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", *TARGET, *flags, "--listen", "127.0.0.1:0"],
        env=environment("step-attention"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready" in line or "error" in line:
                break
        assert any("self-check passed" in line for line in lines), "".join(lines)
    finally:
        process.kill()
        process.wait()
