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


OF_FOUR = """
import sys
import torch
import torch.distributed as dist
from ssd_engine.models import tensor_parallel
from ssd_engine.models.tensor_parallel import RankGroup

rank, store, tensor_parallel.GATHERED_BYTES = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
group = RankGroup(rank, 4, torch.device("cpu"), rank, 4)
torch.manual_seed(0)
for rows, width, dtype in [(24, 64, torch.bfloat16), (3, 5, torch.float32), (7, 64, torch.float64)]:
    parts = torch.randn(4, rows, width).mul(torch.tensor([1, 30, 900, 7]).view(4, 1, 1)).to(dtype)
    mine = parts[rank]
    whole = group.all_reduce(mine.clone())
    one_by_one = torch.stack([group.all_reduce(row.clone()) for row in mine])
    turned = group.all_reduce(mine.flip(0).contiguous()).flip(0)
    wide = torch.promote_types(dtype, torch.float32)
    expected = (parts[0].to(wide) + parts[1] + parts[2] + parts[3]).to(dtype)
    print([torch.equal(each, expected) for each in (whole, one_by_one, turned)])
"""


def run_ranks(script: str, count: int, store: Path, *arguments: str) -> list[str]:
    """What each of them prints."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(store), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [process.communicate(timeout=120)[0].strip() for process in processes]


def test_sums_and_columns_go_through_the_host(tmp_path: Path) -> None:
    first, second = run_ranks(RANK, 2, tmp_path / "store")
    assert first == "[[11.0, 22.0]] [[1.0, 2.0, 10.0, 20.0]] 5"
    assert second == "[[11.0, 22.0]] None 5"


@pytest.mark.parametrize("gathered", [1 << 19, 0], ids=["gathered", "a piece each"])
def test_a_sum_of_four_ranks_is_the_same_wherever_its_row_lies(
    gathered: int, tmp_path: Path
) -> None:
    for said in run_ranks(OF_FOUR, 4, tmp_path / "store", str(gathered)):
        assert said.splitlines() == 3 * ["[True, True, True]"]


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
