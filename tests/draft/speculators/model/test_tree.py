"""The rows of a tree, depth after depth, and what is kept of the branch that is decided."""

import pytest

from ssd_draft.planning.sequence import PreparedBranch
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.tree import Tree
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.kvcache.cached_path import CachedPath

COMMITTED, BLOCK = 10, 4
BLOCKS = [3, 4, 5, 6]
SCRATCH = list(range(100, 112))


def make_tree(max_context: int = 64) -> Tree:
    branches = [PreparedBranch(0, 7), PreparedBranch(0, 8), PreparedBranch(2, 9)]
    return Tree(branches, COMMITTED, BLOCKS, SCRATCH, max_context)


def test_a_row_sees_the_chain_up_to_its_outcome_and_its_own_branch() -> None:
    tree = make_tree()
    first = tree.rows()
    assert first.tokens == [7, 8, 9]
    assert first.positions == [10, 10, 12]
    assert first.limits == [9, 9, 11]
    assert first.slots == first.scratch == SCRATCH[:3]
    tree.extend([20, 21, 22])
    second = tree.rows()
    assert second.tokens == [20, 21, 22]
    assert second.positions == [11, 11, 13]
    assert second.limits == first.limits
    assert second.slots == SCRATCH[3:6]
    assert second.scratch == SCRATCH[:6]


def test_a_depth_that_is_launched_ahead_is_the_one_that_follows() -> None:
    tree = make_tree()
    slots, rows = tree.slots_ahead(), tree.rows_ahead([20, 21, 22])
    tree.extend([20, 21, 22])
    assert rows == tree.rows()
    assert slots == tree.rows().slots


@pytest.mark.parametrize(("max_context", "depth"), [(64, 4), (15, 3), (13, 1)])
def test_a_tree_ends_with_its_scratch_or_with_the_context(max_context: int, depth: int) -> None:
    tree = make_tree(max_context)
    while tree.has_room():
        assert tree.has_room(ahead=1) is (tree.depth + 1 < depth)
        assert max(tree.rows().positions) < max_context
        tree.extend([20, 21, 22])
    assert tree.depth == depth


def test_a_branch_is_found_where_its_rows_were_written() -> None:
    tree = make_tree()
    written = []
    for depth in range(3):
        written.append(tree.rows().slots[2])
        tree.extend([20, 21, 22], [[1, 2], [3, 4], [5 + depth, -1]])
    assert tree.index(tree.branches[2]) == 2
    assert tree.slots_of(2) == written
    assert tree.rankings_of(2) == [[5], [6], [7]]
    assert tree.index(PreparedBranch(2, 9)) is None  # another round's


def test_a_decided_branch_goes_on_after_the_committed_tokens() -> None:
    path = CachedPath(BlockPool(8, BLOCK), list(range(COMMITTED)), ahead=4, max_tokens=13)
    branch = PreparedBranch(2, COMMITTED - 1, [40])
    decided = DecidedBranch(branch, path, BLOCK)
    assert decided.has_room()
    assert decided.has_room(ahead=1)
    assert not decided.has_room(ahead=2)
    (slot,) = decided.slots_ahead()
    rows = decided.rows_ahead([-1])
    assert (rows.start, rows.num_logits) == (COMMITTED + 1, 1)
    assert slot == path.slot(rows.start, BLOCK)
    decided.extend([41], [[41, 42, -1]])
    assert branch.tokens == [40, 41]
    assert branch.rankings == [[41, 42]]


def test_a_branch_ends_where_there_is_no_guess_and_others_go_on() -> None:
    tree = make_tree()
    tree.extend([20, -1, 22])
    tree.extend([23, 24, 25])
    assert [branch.num_useful for branch in tree.branches] == [2, 0, 2]
    assert tree.rows().tokens == [23, 24, 25]
    pushed = [branch.push(8) for branch in tree.branches]
    assert [each.tokens if each else None for each in pushed] == [[20, 23], None, [22, 25]]
    assert tree.has_room()
    tree.extend([-1, 26, -1])
    assert not tree.has_room()
    assert [branch.push(8) for branch in tree.branches] == [None] * 3


def test_a_decided_branch_ends_where_there_is_no_guess() -> None:
    pool = BlockPool(8, BLOCK)
    path = CachedPath(pool, [1] * 5, 6, 64)
    branch = PreparedBranch(1, 7)
    decided = DecidedBranch(branch, path, BLOCK)
    decided.extend([30])
    assert decided.has_room()
    decided.extend([-1])
    assert not decided.has_room()
    assert branch.num_useful == 1
