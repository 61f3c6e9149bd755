"""Two ranks on one GPU, by NCCL: their sums are right, also when a graph replays them."""

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_add_up_on_one_gpu() -> None:
    missing = share_gpus()
    if missing is not None:
        pytest.skip(missing)
    store = loopback_store()
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (p.communicate(timeout=HANG_SECONDS)[0].strip() for p in processes)
    assert first == "True [[11.0, 22.0]] [[1.0, 2.0, 10.0, 20.0]] 5 [6.0] [8.0]"
    assert second == "True [[11.0, 22.0]] None 5 [6.0] [8.0]"
