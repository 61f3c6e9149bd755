"""A head's steps of few rows compute what its plain forward does: interpreted kernels."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.execution import head_step
from ssd_engine.execution.graphs import GraphRunner, step_runs
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner, joined
from ssd_engine.execution.head_step import HeadStepLayers, ToldStates
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, KVCopy, Part, TreeRows, logit_rows
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.sampling.params import SamplingParams
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.head_drafter import HeadDrafter
from tests import clockwork
from tests.engine.execution.emulated_device import emulate, head_runner
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model
from tests.suite.scale import full_only

pytestmark = pytest.mark.usefixtures("quick_interpreter")

FEW = StepShape(rows=8, runs=3, rows_per_run=4, max_positions=160, block_size=BLOCK)
TREE = StepShape(
    rows=8,
    runs=2,
    rows_per_run=4,
    max_positions=160,
    block_size=BLOCK,
    scratch=8,
    moves=4,
    path=3,
)
NUM_BLOCKS = 32
DUMMY = (NUM_BLOCKS - 1) * BLOCK
BLOCKS = [[3, 1, 4], [9, 7, 5]]
LENGTHS = (20, 17)  # rows that are computed before
SCRATCH = 12 * BLOCK  # slots from here on are branches'


FEW_TOKENS = dict(max_model_len=160, max_forward_tokens=64, kernels="torch")


@pytest.fixture(scope="module")
def heads(kind: str, tmp_path_factory: pytest.TempPathFactory) -> HeadRunner:
    folder: Path = tmp_path_factory.mktemp(kind)
    make_model("llama3-untied", folder / "target")
    make_head(KINDS[kind], folder / "head", num_attention_heads=4)
    about = dict(num_kv_blocks=NUM_BLOCKS, **FEW_TOKENS)
    runner = head_runner(folder, SHAPE["vocab_size"], **about)
    chunks = [Chunk(tokens(length, i), 0, BLOCKS[i], 1) for i, length in enumerate(LENGTHS)]
    runner.step_with_features(chunks, [], features(LENGTHS, 1)).result()
    return runner


each_kind = pytest.mark.parametrize(
    "kind",
    ["llama", full_only("qwen3-all-norms"), full_only("llama-two-layers")],
    scope="module",
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(head_step, "PIECE", 64)


def make_step(runner: HeadRunner, shape: StepShape, ranks: int, **further: Any) -> Step:
    """As a device has it."""
    told = runner._told_states = ToldStates(runner.model, shape.padded_rows)
    layers = partial(HeadStepLayers, runner._states, told)
    one = Step(runner.model, runner.kv, shape, ranks, make_layers=layers, **further)
    one.inputs.clear(DUMMY)
    return one


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(count)]


def features(counts: tuple[int, ...], seed: int) -> GivenFeatures:
    torch.manual_seed(seed)
    return GivenFeatures(counts, torch.randn(sum(counts), 3 * SHAPE["hidden_size"]))


def branches(level: int, limits: tuple[int, ...], seed: int = 5) -> TreeRows:
    """One depth of as many branches of the first sequence."""
    count = len(limits)
    scratch = list(range(SCRATCH, SCRATCH + count * (level + 1)))
    positions = [limit + 1 + level for limit in limits]
    context = min(limits) + 1
    about = (positions, limits, scratch[-count:], context, BLOCKS[0], scratch)
    return TreeRows(tokens(count, seed + level), *about)


def compare(
    runner: HeadRunner, shape: StepShape, parts: list[Part], given: GivenFeatures | None = None
) -> None:
    """Logits and states of both, from the same cache; what the plain forward leaves stays."""
    pool, states = runner.kv.pool, runner._states.rows
    before = pool.clone(), states.clone()
    got, left = by_step(runner, shape, parts, given)
    pool.copy_(before[0])
    states.copy_(before[1])
    none = GivenFeatures([0] * sum(not isinstance(part, KVCopy) for part in parts), torch.empty(0))
    expected = runner.step_with_features(parts, [], given or none).result().logits
    drafted = expected.isfinite()
    assert torch.equal(drafted, got.isfinite())
    torch.testing.assert_close(got[drafted], expected[drafted], atol=5e-4, rtol=5e-4)
    keep = torch.ones(len(states), dtype=torch.bool)
    keep[DUMMY] = False  # what pads
    torch.testing.assert_close(left[keep], states[keep], atol=5e-4, rtol=5e-4)


def by_step(
    runner: HeadRunner, shape: StepShape, parts: list[Part], given: GivenFeatures | None
) -> tuple[torch.Tensor, torch.Tensor]:
    one, rows = make_step(runner, shape, 3), logit_rows(parts)
    runs, moves = step_runs(joined(parts), [None] * len(rows), BLOCK)
    one.inputs.fill(runs, DUMMY, moves)
    with torch.inference_mode():
        if given is not None:
            places = torch.tensor(runner._rows_told(parts, given.counts))
            runner._told_states.put(places, runner._combined(given))
        one.run()
        runner._told_states.clear()
    assert one.head_rows == SHAPE["vocab_size"]
    assert one.guesses_on(0)[rows, 0].tolist() == one.logits[rows].argmax(-1).tolist()
    return one.logits[rows].clone(), runner._states.rows.clone()


@each_kind
def test_rows_go_on_from_told_and_from_own_states(heads: HeadRunner) -> None:
    """Some are told, some go on by themselves, and one begins a text."""
    parts: list[Part] = [
        Chunk(tokens(3, 2), LENGTHS[0], BLOCKS[0], 1),
        Chunk(tokens(1, 3), LENGTHS[1], BLOCKS[1], 1),
        Chunk(tokens(1, 4), 0, [20], 1),
    ]
    compare(heads, FEW, parts, features((3, 0, 1), 2))
    # What was told is forgotten after its step.
    compare(heads, FEW, [Chunk(tokens(1, 6), LENGTHS[1] + 1, BLOCKS[1], 1)])


@each_kind
def test_told_rows_and_those_after_them_are_one_run(heads: HeadRunner) -> None:
    """As a draft asks for them: what a round has told, then the chain that is verified, which was
    drafted before."""
    chain = tokens(2, 8)
    for i, token in enumerate(chain):
        heads.step([Chunk([token], LENGTHS[0] + 2 + i, BLOCKS[0], 1)], []).result()
    parts: list[Part] = [
        Chunk(tokens(2, 7), LENGTHS[0], BLOCKS[0], 1),
        Chunk(chain, LENGTHS[0] + 2, [*BLOCKS[0]], 2),
        Chunk(tokens(1, 3), LENGTHS[1], BLOCKS[1], 1),
    ]
    runs = joined(parts)
    assert [(len(each.tokens), each.num_logits) for each in runs] == [(4, 3), (1, 1)]
    compare(heads, FEW, parts, features((2, 0, 0), 3))


def test_chunks_of_which_nothing_follows_stay_apart() -> None:
    first = Chunk([1, 2], 0, [3], 1)
    gap, other = Chunk([4], 3, [3], 1), Chunk([4], 2, [5], 1)
    silent = Chunk([4, 5], 2, [3], 1)  # its first row has no logits, that before it has
    copy = KVCopy([9], 2, [3])
    for second in (gap, other, silent, copy):
        assert joined([first, second]) == [first, second]


@each_kind
def test_branches_go_on_from_what_they_leave(heads: HeadRunner) -> None:
    """The first tokens go on from the text, those after them from their own branch, and the branch
    that is taken is moved."""
    limits = (18, 19, 19, 16)
    for level in range(2):
        compare(heads, TREE, [branches(level, limits)])
    taken = [SCRATCH + 1, SCRATCH + len(limits) + 1]
    moved = KVCopy(taken, 20, BLOCKS[0])
    chunk = Chunk(tokens(1, 9), 22, BLOCKS[0], 1)
    compare(heads, TREE, [moved, chunk])


DEPTH = 4
ROUND = StepShape(rows=8, runs=2, rows_per_run=5, max_positions=160, block_size=BLOCK)


def drafting_by_steps(folder: Path) -> tuple[HeadRunner, list[int]]:
    """A head whose steps are launched one by one, and the rows of each of them; none of those that
    go on from the step before, as it was."""
    about = dict(max_num_seqs=2, num_kv_blocks=NUM_BLOCKS, **FEW_TOKENS)
    heads = head_runner(folder, clockwork.VOCAB, **about)
    heads.num_blocks, heads.dummy_slot = NUM_BLOCKS - 1, DUMMY
    last = torch.zeros(ROUND.rows, dtype=torch.int32)
    histories = Histories(2, ROUND.rows, clockwork.VOCAB, torch.device("cpu"), False, DEPTH)
    one = make_step(heads, ROUND, 2, last=last, num_sides=2, histories=histories)
    heads.steps = GraphRunner([one], eager=True)
    rows: list[int] = []
    launch, deepen = heads.steps.launch, heads.steps.deepen

    def counted(parts: Sequence[Part], *about: Any) -> Any:
        rows.append(sum(len(part.tokens) for part in parts))
        return launch(parts, *about)

    def deepened(*about: Any) -> Any:
        rows.append(0)
        return deepen(*about)

    heads.steps.launch, heads.steps.deepen = counted, deepened  # type: ignore[method-assign]
    return heads, rows


# The text of a request; where its head does not know all tokens, those that it knows, which are
# banned; and the rows of each of the steps that it has drafted by.
Drafted = tuple[Result, Sequence[int], list[int]]


def draft(folder: Path, count: int, known: int = clockwork.VOCAB, **sampling: Any) -> Drafted:
    clockwork.make_target(folder / "target")
    clockwork.make_head(folder / "head", known)
    target = make_runner(folder / "target", num_blocks=64)
    heads, rows = drafting_by_steps(folder)
    target.watch(heads._config.boundaries or ())
    drafter = HeadDrafter(heads, BLOCK, 160, DEPTH, 32)
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    speculator = SpeculationCoordinator(options, clockwork.VOCAB, drafter=drafter)
    core = make_core(target, max_num_seqs=2, prefill_chunk=32, speculator=speculator)
    sync = SpeculationRequest(mode=Mode.SYNC, depth=DEPTH)
    banned = heads.model.head_weights.target_tokens.tolist() if known < clockwork.VOCAB else ()
    bans = dict(banned=tuple(banned), banned_until=len(PROMPT) + count)
    params = SamplingParams(seed=1, **bans, **sampling)
    (found,) = run(core, [Request(PROMPT, params, count, speculation=sync)])
    return found, banned, rows


PROMPT = [5, 11, 7, 60, 2, 9, 3, 8, 1]


def test_a_head_inside_a_target_drafts_by_steps(tmp_path: Path) -> None:
    """Every token is foreseen, as by plain forwards: told rows go before those that are drafted."""
    result, _, rows = draft(tmp_path, 12, temperature=0.0)
    expected = [clockwork.follower(1)]
    while len(expected) < 12:
        expected.append(clockwork.follower(expected[-1]))
    assert result.tokens == expected
    stats = result.speculation
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    # Those that a round has told, two that go on by themselves, and one that goes as deep again.
    assert rows[-4:] == [DEPTH + 1, 1, 1, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_knows_no_token_that_may_come_drafts_none_by_steps(
    tmp_path: Path, temperature: float
) -> None:
    result, banned, rows = draft(tmp_path, 4, known=40, temperature=temperature)
    assert rows
    assert not {*result.tokens} & {*banned}
    assert result.speculation.drafted_tokens == 0
