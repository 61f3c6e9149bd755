"""A tree's mask as bits, made where it is used, says what the runs say."""

import random

import numpy as np
import torch

from ssd_engine.attention.base import TreeRun
from ssd_engine.attention.tree_mask import packed_masks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_run(rng: random.Random) -> TreeRun:
    rows, context = rng.randint(1, 30), rng.randint(1, 200)
    limits = [context - 1 + rng.randint(0, 7) for _ in range(rows)]
    scratch = list(range(1000, 1000 + rows * rng.randint(1, 6)))
    return TreeRun(rows, context, list(range(20)), limits, scratch)


def test_masks_are_those_of_the_runs() -> None:
    rng = random.Random(1)
    for _ in range(40):
        runs = [make_run(rng) for _ in range(rng.randint(1, 4))]
        expected = [np.packbits(run.visible(), axis=None, bitorder="little") for run in runs]
        packed, sizes = packed_masks(runs, DEVICE)
        assert sizes == list(map(len, expected))
        assert packed.dtype is torch.uint8
        assert packed.cpu().numpy().tolist() == np.concatenate(expected).tolist()
