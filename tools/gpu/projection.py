"""Separate GPUs, projected: each side timed alone on this one, combined by theorem 7.

How many tokens a round gives, and how often it hits, is counted with a draft that is never late:
the shipped one, ungrown, beside a large target. Grown models say the same, so these rates are those
of both pairs.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ssd_client.bench.measure.theory import theorem7
from ssd_draft.config import DraftConfig
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Draw
from tools.bench_kit import Client, Generated, story_prompts
from tools.bench_overlap import DraftAlone, time_rounds
from tools.gpu import engines
from tools.gpu.report import Rows
from tools.gpu.serving import PAIRS, grown, mode_row, mps, pair

# Branches of a round: as they come, and as few as a draft takes that would be late with more.
BUDGETS = (DraftConfig.budget, 8)
CONTEXT = 300
DEPTHS = (1, 2, 3, 4, 5)
TREES = tuple(product(DEPTHS, BUDGETS))
BATCHES = (1, 4, 8, 16)
TOKENS = 128


@dataclass(frozen=True)
class Rates:
    """What one kind of tree gives: tokens a round in turns; with a draft of its own, hits and the
    tokens of each."""

    e_sd: float
    p: float
    e_hit: float
    e_miss: float


Tree = tuple[int, int]  # depth and branches


@dataclass(frozen=True)
class Times:
    """Milliseconds of each side alone, at one batch."""

    verify: dict[int, float]  # by depth, 0 for plain decoding
    step: float  # one token of a draft that takes turns with its target
    trees: dict[Tree, tuple[float, float]]  # a tree after a hit, and the backup after a miss


def project(num_prompts: int) -> Rows:
    prompts = story_prompts(min(num_prompts, 6), seed=14)
    rates = {tree: rate for budget in BUDGETS for tree, rate in _rates(prompts, budget).items()}
    rows: Rows = []
    for target, draft in PAIRS:
        times = _times(target, draft)
        rows += [_project(target, draft, batch, rates, times[batch]) for batch in BATCHES]
    return rows


def _rates(prompts: Sequence[str], budget: int) -> dict[Tree, Rates]:
    models = grown(PAIRS[0][0], "")
    with mps(), pair(models, 1, max(DEPTHS), "--backup", "jit", budget=budget) as client:
        for mode in ("sync", "ssd"):
            client.generate(prompts[0], mode, 32)
        return {(depth, budget): _count(client, prompts, depth) for depth in DEPTHS}


def _count(client: Client, prompts: Sequence[str], depth: int) -> Rates:
    def generate(mode: str) -> list[Generated]:
        return [
            client.generate(prompt, mode, TOKENS, depth, seed=seed, **engines.SAMPLING)
            for seed, prompt in enumerate(prompts)
        ]

    rows = {mode: mode_row(generate(mode), mode) for mode in ("sync", "ssd")}
    ssd = rows["ssd"]
    hit, miss = ssd["E_hit"] or 1.0, ssd["E_miss"] or 1.0
    return Rates(rows["sync"]["tokens/round"], ssd["from the cache"], hit, miss)


def _project(
    target: str, draft: str, batch: int, rates: dict[Tree, Rates], times: Times
) -> dict[str, Any]:
    """Rates are those of all sequences together. Each has its own hits: none waits for another."""

    def in_turns(depth: int) -> float:
        seconds = 1e-3 * (times.verify[depth] + depth * times.step)
        return batch * rates[depth, BUDGETS[0]].e_sd / seconds

    def at_once(tree: Tree) -> float:
        prepared, backup = times.trees[tree]
        rate, verify = rates[tree], times.verify[tree[0]]
        parts = (1e-3 * verify, prepared / verify, backup / verify)
        return batch * theorem7(rate.p, rate.e_hit, rate.e_miss, *parts)

    slow, fast = max(DEPTHS, key=in_turns), max(TREES, key=at_once)
    verify, rate, e_sd = times.verify[fast[0]], rates[fast], rates[slow, BUDGETS[0]].e_sd
    turns = slow * times.step / times.verify[slow]
    sync, ssd = in_turns(slow), at_once(fast)
    ceiling = (1 + turns) * times.verify[slow] / verify * rate.e_hit / e_sd
    return {
        "projection": f"{target}, {draft} on GPUs of their own",
        "batch": batch,
        "T_v, ms": verify,
        "K sync": slow,
        "T_SD": turns,
        "E_SD": e_sd,
        "K ssd": fast[0],
        "branches": fast[1],
        "T_p": times.trees[fast][0] / verify,
        "T_b": times.trees[fast][1] / verify,
        "p": rate.p,
        "E_hit": rate.e_hit,
        "E_miss": rate.e_miss,
        "off, tokens/s": batch * 1e3 / times.verify[0],
        "sync, tokens/s": sync,
        "ssd, tokens/s": ssd,
        "ssd / sync": ssd / sync,
        "ceiling": ceiling,
        "of the ceiling": ssd / sync / ceiling,
    }


def _times(target: str, draft: str) -> dict[int, Times]:
    verify, step, trees = _verify_ms(target), _step_ms(draft), _trees_ms(draft)
    return {batch: Times(verify[batch], step[batch], trees[batch]) for batch in BATCHES}


def _verify_ms(shape: str) -> dict[int, dict[int, float]]:
    runner = engines.load_runner(
        "stories-target", shape, max_num_seqs=engines.MAX_NUM_SEQS, num_kv_blocks=512
    )
    tables = _tables(runner)
    found = {
        batch: {
            depth: engines.time_step(
                runner,
                [Chunk([7] * (depth + 1), CONTEXT, t, depth + 1) for t in tables[:batch]],
                engines.SAMPLED,
                repeats=30,
            )
            for depth in (0, *DEPTHS)
        }
        for batch in BATCHES
    }
    del runner
    engines.free_memory()
    return found


def _tables(runner: ModelRunner) -> list[list[int]]:
    """Block tables of as many sequences as the largest batch has, each with its context."""
    width = CONTEXT // engines.BLOCK + 2
    tables = [list(range(i * width, (i + 1) * width)) for i in range(max(BATCHES))]
    for table in tables:
        engines.fill_context(runner, CONTEXT, table)
    return tables


def _step_ms(shape: str) -> dict[int, float]:
    """One token of a draft that takes turns with its target, the host's part included."""
    runner = engines.load_runner(
        "stories-draft", shape, exact=False, step_rows=2, ranks=2, max_num_seqs=max(BATCHES)
    )
    tables = _tables(runner)
    found = {}
    for batch in BATCHES:
        parts = [Chunk([7], CONTEXT, table, 1) for table in tables[:batch]]
        draws = [Draw.of(engines.SAMPLED, CONTEXT + 1)] * batch
        times = []
        for _ in range(60):
            begin = time.perf_counter()
            if runner.step(parts, draws).result().following is None:
                raise SystemExit("the device has chosen nothing")
            times.append(time.perf_counter() - begin)
        found[batch] = 1e3 * statistics.median(times[5:])
    del runner
    engines.free_memory()
    return found


def _trees_ms(shape: str) -> dict[int, dict[Tree, tuple[float, float]]]:
    """For every batch and tree: trees after hits, and backups after misses."""
    deepest, most, widest = max(DEPTHS), max(BATCHES), max(BUDGETS)
    runner = engines.load_runner(
        "stories-draft",
        shape,
        exact=False,
        step_rows=deepest + 1,
        branches=widest,
        ranks=17,
        max_tail=widest * (deepest + 1) + deepest,
        max_num_seqs=most,
        max_forward_tokens=max(512, 2 * most * (widest + deepest + 1)),
    )

    found = {
        batch: {
            tree: time_rounds(DraftAlone(runner, *tree, batch, engines.SAMPLED)) for tree in TREES
        }
        for batch in BATCHES
    }
    del runner
    engines.free_memory()
    return found
