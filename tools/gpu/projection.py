"""Separate GPUs, projected: each side timed alone on this one, combined by theorem 7.

How many tokens a round gives, and how often it hits, is counted with a draft that is never late:
the shipped one, ungrown, beside a large target. Grown models say the same, so these rates are those
of both pairs.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssd_engine.batch import Chunk, Draw
from ssd_engine.fan_out import theorem7
from ssd_engine.runner import ModelRunner
from tools.bench_kit import Client, story_prompts
from tools.bench_overlap import DraftAlone, time_rounds
from tools.gpu import engines
from tools.gpu.report import Rows
from tools.gpu.serving import PAIRS, grown, mode_row, mps, pair

BUDGET = 24
CONTEXT = 300
DEPTHS = (1, 2, 3, 4, 5, 6, 7)
TOKENS = 128


@dataclass(frozen=True)
class Rates:
    """Of one depth: tokens a round in turns; with a draft of its own, hits and what they give."""

    e_sd: float
    p: float
    e_hit: float
    e_miss: float


def project(num_prompts: int) -> Rows:
    rates = _rates(story_prompts(min(num_prompts, 6), seed=14))
    return [_project(target, draft, rates) for target, draft in PAIRS]


def _rates(prompts: Sequence[str]) -> dict[int, Rates]:
    models = grown(PAIRS[0][0], "")
    with mps(), pair(models, 1, max(DEPTHS), "--backup", "jit") as client:
        for mode in ("sync", "ssd"):
            client.generate(prompts[0], mode, 32)
        return {depth: _count(client, prompts, depth) for depth in DEPTHS}


def _count(client: Client, prompts: Sequence[str], depth: int) -> Rates:
    rows = {
        mode: mode_row([client.generate(p, mode, TOKENS, depth) for p in prompts], mode)
        for mode in ("sync", "ssd")
    }
    ssd = rows["ssd"]
    hit, miss = ssd["E_hit"] or 1.0, ssd["E_miss"] or 1.0
    return Rates(rows["sync"]["tokens/round"], ssd["from the cache"], hit, miss)


def _project(target: str, draft: str, rates: dict[int, Rates]) -> dict[str, Any]:
    verify = _verify_ms(target)
    step = _step_ms(draft)
    plain = 1e3 / verify

    def in_turns(depth: int) -> float:
        return rates[depth].e_sd / (1e-3 * (verify + depth * step))

    def at_once(depth: int) -> float:
        tree, backup = trees[depth]
        rate = rates[depth]
        times = (1e-3 * verify, tree / verify, backup / verify)
        return theorem7(rate.p, rate.e_hit, rate.e_miss, *times)

    trees = _trees_ms(draft)
    slow, fast = max(DEPTHS, key=in_turns), max(DEPTHS, key=at_once)
    turns, rate = slow * step / verify, rates[fast]
    sync, ssd = in_turns(slow), at_once(fast)
    ceiling = (1 + turns) * rate.e_hit / rates[slow].e_sd
    return {
        "projection": f"{target}, {draft} on GPUs of their own",
        "T_v, ms": verify,
        "K sync": slow,
        "T_SD": turns,
        "E_SD": rates[slow].e_sd,
        "K ssd": fast,
        "T_p": trees[fast][0] / verify,
        "T_b": trees[fast][1] / verify,
        "p": rate.p,
        "E_hit": rate.e_hit,
        "E_miss": rate.e_miss,
        "off, tokens/s": plain,
        "sync, tokens/s": sync,
        "ssd, tokens/s": ssd,
        "ssd / sync": ssd / sync,
        "ceiling": ceiling,
        "of the ceiling": ssd / sync / ceiling,
    }


def _verify_ms(shape: str) -> float:
    runner = engines.load_runner("stories-target", shape)
    blocks = list(range(32))
    engines.fill_context(runner, CONTEXT, blocks)
    ms = engines.time_step(runner, [Chunk([7] * 8, CONTEXT, blocks, 8)])
    del runner
    engines.free_memory()
    return ms


def _step_ms(shape: str) -> float:
    """One token of a draft that takes turns with its target, the host's part included."""
    runner = engines.load_runner("stories-draft", shape, exact=False, step_rows=2)
    blocks = list(range(32))
    engines.fill_context(runner, CONTEXT, blocks)
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        _next_token(runner, blocks)
        times.append(time.perf_counter() - begin)
    del runner
    engines.free_memory()
    return 1e3 * statistics.median(times[5:])


def _next_token(runner: ModelRunner, blocks: list[int]) -> int:
    chunk = Chunk([7], CONTEXT, blocks, 1)
    drawn = runner.step([chunk], [Draw(1, 0.0, CONTEXT + 1)]).result().drawn
    if drawn is None:
        raise SystemExit("the device has drawn nothing")
    return drawn[0]


def _trees_ms(shape: str) -> dict[int, tuple[float, float]]:
    """For every depth: a tree after a hit, and the backup after a miss."""
    deepest = max(DEPTHS)
    runner = engines.load_runner(
        "stories-draft",
        shape,
        exact=False,
        step_rows=deepest + 1,
        branches=BUDGET,
        ranks=17,
        max_tail=BUDGET * (deepest + 1) + deepest,
        max_num_seqs=8,
    )
    times = {depth: time_rounds(DraftAlone(runner, depth, BUDGET)) for depth in DEPTHS}
    del runner
    engines.free_memory()
    return times
