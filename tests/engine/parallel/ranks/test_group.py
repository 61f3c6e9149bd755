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
from ssd_engine.parallel.ranks.group import NCCL_SHARES_GPUS, join_group
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
    ("devices", "nccl", "backend", "kind"),
    [
        ((0, 1), (2, 28, 9), "nccl", RankGroup),
        ((0, 0), (2, 30, 0), "nccl", RankGroup),
        ((0, 0), (2, 28, 9), "gloo", GroupThroughHost),
    ],
)
def test_how_ranks_meet(
    devices: tuple[int, ...],
    nccl: tuple[int, ...],
    backend: str,
    kind: type[RankGroup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: begun.append(name))
    options = RunnerOptions(Path(), "bfloat16", "cuda", 16, 64, 1, 64, devices=devices)
    group = join_group(1, RankPlacement(size=2, first=0, here=2), object(), options)
    assert (begun, type(group)) == ([backend], kind)
    assert group.in_graphs == (backend == "nccl")
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    assert asked == (devices == (0, 0) and nccl >= NCCL_SHARES_GPUS)
