"""Features of a model on several ranks: real processes, where ranks exchange."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_engine.parallel.ranked_runner import RankedRunner
from ssd_engine.parallel.ranks import failures
from tests.random_models import make_model

COMPARE = """
import os
import sys
from pathlib import Path

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.parallel.ranked_runner import RankedRunner

directory = Path(sys.argv[1])
options = RunnerOptions(
    directory=directory,
    dtype="float32",
    device="cpu",
    block_size=16,
    max_model_len=256,
    max_num_seqs=4,
    max_forward_tokens=64,
    num_kv_blocks=32,
    threads=2,
)
config = load_model_config(directory)
parts = [Chunk(list(range(3, 40)), 0, [1, 2, 3], 1), Chunk([5, 6], 0, [4], 2)]
told, runners = [], []  # ranks that lose their first one are a failure
for ranks in (2, 1):
    runner = RankedRunner(config, options, ranks, role="target", log_level="WARNING")
    runners.append(runner)
    runner.forward(parts)
    assert runner.features is None
    assert runner.prepare_watch((3, 1))
    runner.watch((3, 1))
    runner.forward(parts)
    assert runner.features.shape == (39, 128)
    step = runner.step(parts, [None] * 3).result().features
    assert (step - runner.features).abs().max() < 1e-5
    told.append(runner.features)
    try:
        runner.watch((4,))
    except ConfigError as error:
        print(error)  # no rank has heard of it
    runner.watch(())
    runner.forward(parts)
    assert runner.features is None
print("equal" if (told[0] - told[1]).abs().max() < 1e-4 else "not equal", flush=True)
os._exit(0)
"""


def test_two_ranks_tell_what_one_does(tmp_path: Path) -> None:
    make_model("llama3-untied", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("boundary 4 is asked for: the model has 3 layers") == 2
    assert done.stdout.splitlines()[-1] == "equal"


class _Full:
    """The first rank's own runner, and the channel to the others, beside which nothing fits."""

    config = SimpleNamespace(num_layers=3)

    def send(self, values: Any) -> None:
        pass

    def prepare_watch(self, boundaries: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")


def _lost(self: _Full, boundaries: Any) -> bool:
    raise RuntimeError("Connection closed by peer")


def test_the_first_rank_waits_for_nobody_who_dies_when_it_has_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", waits.append)
    ranked: Any = object.__new__(RankedRunner)
    ranked._runner = ranked._channel = _Full()
    with pytest.raises(torch.OutOfMemoryError):
        ranked.prepare_watch((1, 2))
    assert waits == []
    monkeypatch.setattr(_Full, "prepare_watch", _lost)
    with pytest.raises(RuntimeError, match="closed by peer"):
        ranked.prepare_watch((1, 2))
    assert waits == [failures.REPORT_SECONDS]
