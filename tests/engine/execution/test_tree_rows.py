"""A tree computes what each of its branches would give alone."""

import random

import numpy as np
import pytest
import torch

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import (
    Chunk,
    KVCopy,
    TreeRows,
    decode_parts,
    encode_parts,
    max_encoded_size,
)
from tests.harness import BLOCK, make_runner
from tests.random_models import make_model


@pytest.fixture(scope="module", params=["llama3-untied", "qwen3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp(request.param)
    make_model(request.param, directory)
    return make_runner(directory)


class Case:
    """A sequence with a chain after it, and branches that leave the chain at some place."""

    def __init__(self, rng: random.Random, first_block: int, rows: int, depth: int) -> None:
        self.prefix = [rng.randrange(512) for _ in range(rng.randrange(1, 70))]
        self.chain = [rng.randrange(512) for _ in range(4)]
        self.leaves = [rng.randrange(5) for _ in range(rows)]  # tokens of the chain that are seen
        self.branches = [[rng.randrange(512) for _ in range(depth)] for _ in range(rows)]
        self.blocks = list(range(first_block, first_block + 6))
        rng.shuffle(self.blocks)
        self.scratch = [(first_block + 6) * BLOCK + i for i in range(rows * depth)]

    def chunk(self) -> Chunk:
        return Chunk(self.prefix + self.chain, 0, self.blocks, 1)

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def rows(self, depth: int) -> TreeRows:
        n, rows = len(self.prefix), len(self.branches)
        return TreeRows(
            tokens=[branch[depth] for branch in self.branches],
            positions=[n + leave + depth for leave in self.leaves],
            limits=[n + leave - 1 for leave in self.leaves],
            slots=self.scratch[rows * depth : rows * (depth + 1)],
            context=n,
            blocks=self.blocks,
            scratch=self.scratch[: rows * (depth + 1)],
        )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_tree_equal_the_branch_alone(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    depth = 3
    cases = [Case(rng, 12 * i, rng.choice([1, 4, 7]), depth) for i in range(4)]
    runner.forward([case.chunk() for case in cases])
    for level in range(depth):
        # A chunk of another sequence travels in the same forward.
        other = Chunk([rng.randrange(512) for _ in range(5)], 0, [200], 2)
        logits = runner.forward([other, *(case.rows(level) for case in cases)])
        at = 2
        for case in cases:
            for i, branch in enumerate(case.branches):
                path = case.prefix + case.chain[: case.leaves[i]] + branch[: level + 1]
                alone = runner.forward([Chunk(path, 0, list(range(300, 310)), 1)])
                torch.testing.assert_close(logits[at + i], alone[0], atol=1e-4, rtol=1e-4)
            at += len(case.branches)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_a_branch_that_was_moved_goes_on_as_if_computed_in_place(
    runner: ModelRunner, seed: int
) -> None:
    rng = random.Random(seed)
    depth = 3
    case = Case(rng, 0, 5, depth)
    runner.forward([case.chunk()])
    for level in range(depth):
        runner.forward([case.rows(level)])
    chosen = rng.randrange(5)
    start = len(case.prefix) + case.leaves[chosen]
    moved = KVCopy(case.scratch[chosen::5], start, case.blocks)
    next_token = rng.randrange(512)
    logits = runner.forward([moved, Chunk([next_token], moved.end, case.blocks, 1)])
    path = case.prefix + case.chain[: case.leaves[chosen]] + case.branches[chosen]
    alone = runner.forward([Chunk([*path, next_token], 0, list(range(300, 310)), 1)])
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_parts_travel_as_integers() -> None:
    rng = random.Random(5)
    parts = [
        Case(rng, 0, 7, 3).rows(2),
        Chunk([1, 2, 3], 4, [5, 6], 2, num_scored=1),
        KVCopy([9, 8, 7], 30, [1, 2, 3]),
        Case(rng, 9, 1, 3).rows(0),
    ]
    flat = encode_parts(parts)
    assert len(flat) <= max_encoded_size(11, 3, 6, max_tail=25)
    for part, back in zip(parts, decode_parts(flat), strict=True):
        assert type(part) is type(back)
        for name in part.__dataclass_fields__:
            assert np.array_equal(getattr(part, name), getattr(back, name)), name


def test_there_is_room_for_all_that_one_sequence_can_send() -> None:
    blocks, tree = list(range(6)), Case(random.Random(5), 0, 7, 3).rows(2)
    parts = [KVCopy(range(5), 30, blocks), Chunk(range(5), 35, blocks, 0), tree]
    tokens, tail = 5 + len(tree.tokens), len(tree.scratch)
    assert len(encode_parts(parts)) <= max_encoded_size(tokens, 1, 6, max_tail=tail)
    chunk = Chunk(list(range(8)), 0, list(range(3)), 1)
    assert len(encode_parts([chunk])) <= max_encoded_size(8, 1, 3)
