"""Ranks on one GPU, by NCCL: their sums are right, also when a graph replays them, and with four
ranks a row's bits do not depend on its place."""

import os
import subprocess
import sys

import pytest
import torch

from ssd_engine.parallel.ranks.group import loopback_store
from ssd_engine.process.nccl_library import share_gpus
from tests.waiting import HANG_SECONDS

RANK = """
import sys
from pathlib import Path
import torch
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.parallel.ranks.group import dial_store, join_group
from ssd_engine.parallel.ranks.rank_start import RankPlacement

rank, port = int(sys.argv[1]), int(sys.argv[2])
options = RunnerOptions(Path(), "bfloat16", "cuda", 16, 64, 1, 64, devices=(0, 0))
group = join_group(rank, RankPlacement(2, 0, 2), dial_store(port), options)
mine = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, device="cuda") * 10**rank
total, columns = group.all_reduce(mine.clone()).tolist(), group.gather_columns(mine)
said = [group.in_graphs, total, None if columns is None else columns.tolist()]
said.append(group.minimum(5 + rank))
graph, row = torch.cuda.CUDAGraph(), torch.zeros(8192, dtype=torch.bfloat16, device="cuda")
with torch.cuda.graph(graph):
    group.all_reduce(row)
for value in (3.0, 4.0):
    row.fill_(value)
    graph.replay()
    said.append(row.unique().tolist())
print(*said)
"""


OF_FOUR = """
import sys
from pathlib import Path
import torch
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models import tensor_parallel
from ssd_engine.parallel.ranks.group import dial_store, join_group
from ssd_engine.parallel.ranks.rank_start import RankPlacement

rank, port = int(sys.argv[1]), int(sys.argv[2])
options = RunnerOptions(Path(), "bfloat16", "cuda", 16, 64, 1, 64, devices=(0, 0, 0, 0))
group = join_group(rank, RankPlacement(4, 0, 4), dial_store(port), options)
torch.manual_seed(0)
parts = torch.randn(4, 40, 2048).mul(torch.tensor([1, 30, 900, 7]).view(4, 1, 1)).bfloat16()
expected = parts.float().cumsum(0)[-1].bfloat16().cuda()
mine = parts[rank].cuda()
for tensor_parallel.GATHERED_BYTES in (1 << 19, 0):
    whole = group.all_reduce(mine.clone())
    last = group.all_reduce(mine[-1:].clone())
    print(torch.equal(whole, expected), torch.equal(last, expected[-1:]))
tensor_parallel.GATHERED_BYTES = 1 << 19
graph, row = torch.cuda.CUDAGraph(), torch.zeros_like(mine[:3])
with torch.cuda.graph(graph):
    total = group.all_reduce(row)
for begin in (0, 20):
    row.copy_(mine[begin : begin + 3])
    graph.replay()
    print(torch.equal(total, expected[begin : begin + 3]))
"""


def run_ranks(script: str, count: int) -> list[str]:
    """What each of them prints."""
    missing = share_gpus()
    if missing is not None:
        pytest.skip(missing)
    store = loopback_store()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(store.port)],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [process.communicate(timeout=HANG_SECONDS)[0].strip() for process in processes]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_two_ranks_add_up_on_one_gpu() -> None:
    first, second = run_ranks(RANK, 2)
    assert first == "True [[11.0, 22.0]] [[1.0, 2.0, 10.0, 20.0]] 5 [6.0] [8.0]"
    assert second == "True [[11.0, 22.0]] None 5 [6.0] [8.0]"


def test_a_row_that_four_ranks_add_up_has_its_bits_anywhere() -> None:
    for said in run_ranks(OF_FOUR, 4):
        assert said.splitlines() == ["True True", "True True", "True", "True"]
