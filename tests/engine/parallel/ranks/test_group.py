"""Ranks that share a GPU, for debugging: by NCCL where it allows that, else through the host."""

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models import tensor_parallel
from ssd_engine.models.tensor_parallel import GroupThroughHost, RankGroup
from ssd_engine.parallel.ranks import group as group_module
from ssd_engine.parallel.ranks.group import join_group
from ssd_engine.parallel.ranks.rank_start import RankPlacement
from tests.suite.forked_services import results

ROWS = [(24, 64, torch.bfloat16), (3, 5, torch.float32), (7, 64, torch.float64)]


def add_up(rank: int, store: Path) -> tuple[list[bool], list[list[int]] | None, int]:
    """One of four: whether sums are those of one order, columns of all, and a minimum."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    group, through_host = (
        kind(rank, 4, torch.device("cpu"), rank, 4) for kind in (RankGroup, GroupThroughHost)
    )
    torch.manual_seed(0)
    scale, same = torch.tensor([1, 30, 900, 7]).view(4, 1, 1), []
    for (rows, width, dtype), gathered in itertools.product(ROWS, (1 << 19, 0)):
        tensor_parallel.GATHERED_BYTES = gathered  # else a piece each
        parts = torch.randn(4, rows, width).mul(scale).to(dtype)
        mine, wide = parts[rank], parts.to(torch.promote_types(dtype, torch.float32))
        expected = (wide[0] + wide[1] + wide[2] + wide[3]).to(dtype)
        one_by_one = torch.stack([group.all_reduce(row.clone()) for row in mine])
        turned = group.all_reduce(mine.flip(0).contiguous()).flip(0)
        sums = [each.all_reduce(mine.clone()) for each in (group, through_host)]
        same += [torch.equal(each, expected) for each in (*sums, one_by_one, turned)]
    columns = through_host.gather_columns(torch.tensor([[rank, 2 * rank]]))
    return same, None if columns is None else columns.tolist(), through_host.minimum(5 + rank)


def test_a_sum_of_four_ranks_is_the_same_wherever_its_row_lies(tmp_path: Path) -> None:
    found = results("rank", add_up, [(rank, tmp_path / "store") for rank in range(4)])
    for rank, (same, columns, least) in enumerate(found):
        assert all(same)
        assert columns == (None if rank else [[0, 0, 1, 2, 2, 4, 3, 6]])
        assert least == 5


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
