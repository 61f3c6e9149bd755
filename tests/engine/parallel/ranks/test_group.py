"""Ranks that share a GPU, for debugging: by NCCL where it allows that, else through the host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models.tensor_parallel import GroupThroughHost, RankGroup
from ssd_engine.parallel.ranks import group as group_module
from ssd_engine.parallel.ranks.group import join_group
from ssd_engine.parallel.ranks.rank_start import RankPlacement

RANK = """
import sys
import torch
import torch.distributed as dist
from ssd_engine.models.tensor_parallel import GroupThroughHost

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = GroupThroughHost(rank, 2, torch.device("cpu"), rank, 2)
mine = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16) * 10**rank
total = group.all_reduce(mine.clone()).tolist()
columns = group.gather_columns(mine)
print(total, None if columns is None else columns.tolist(), group.minimum(5 + rank))
"""


def test_sums_and_columns_go_through_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=120)[0].strip() for process in processes)
    assert first == "[[11.0, 22.0]] [[1.0, 2.0, 10.0, 20.0]] 5"
    assert second == "[[11.0, 22.0]] None 5"


@pytest.mark.parametrize(
    ("devices", "missing", "backend", "kind", "told"),
    [
        ((0, 1), "nothing is asked", "nccl", RankGroup, ""),
        ((0, 0), None, "nccl", RankGroup, "--devices 0,0: NCCL 2.32.3 joins ranks"),
        ((0, 0), "NCCL is too old", "gloo", GroupThroughHost, "names a GPU twice, and NCCL is too"),
    ],
)
def test_how_ranks_meet(
    devices: tuple[int, ...],
    missing: str | None,
    backend: str,
    kind: type[RankGroup],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(group_module, "share_gpus", lambda: missing)
    monkeypatch.setattr(group_module, "loaded_version", lambda: (2, 32, 3))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: begun.append(name))
    options = RunnerOptions(Path(), "bfloat16", "cuda", 16, 64, 1, 64, devices=devices)
    with caplog.at_level("INFO"):
        group = join_group(1, RankPlacement(size=2, first=0, here=2), object(), options)
    assert (begun, type(group)) == ([backend], kind)
    assert group.in_graphs == (backend == "nccl")
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)
