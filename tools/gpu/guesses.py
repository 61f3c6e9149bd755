"""What a draft guesses on the GPU and on the CPU, with the same options, prompts and tree.

Target and draft run in one process and in turns, so that no branch is late: what is counted is what
is guessed, not when. The target, and one of the drafts, compute on the CPU. The draft on the GPU
chooses among as many tokens as a large model has; a checkpoint's own tokens are all that is drawn.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from ssd_draft.config import DraftConfig
from ssd_draft.planning.plan import RANKS, Planner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.speculation.frames import Verification
from ssd_target.config import TargetConfig
from tests.simulation import DRAFT_DEPTH
from tools.bench_guessing import DRAFT, HIT_RATE, PER_ROUND, Bench, Counts, Way
from tools.gpu import engines
from tools.gpu.options import OPTIONS, PLAIN
from tools.gpu.report import FAILED, Rows

DEPTH, BUDGET = TargetConfig.depth, DraftConfig.budget
TOKENS = 96
SEQUENCES = 16
SEEDS = {Verification.COUPLED: 1, Verification.REJECTION: 4}  # of a prompt: rejection's luck varies
HEAD = "hidden=256,vocab=128256"  # a hidden entry of its own keeps the new tokens undrawn
MakeDraft = Callable[[], ModelRunner]
MOST_POINTS, MOST_SHARE = 0.03, 0.03  # by which hit rates and tokens a round may differ


def guesses(num_prompts: int) -> Rows:
    return compare(min(num_prompts, SEQUENCES), TOKENS, draft_on_gpu, OPTIONS)


def compare(
    prompts: int, tokens: int, draft: MakeDraft, options: Mapping[str, Mapping[str, Any]]
) -> Rows:
    """``draft`` makes the one that is held against one on the CPU. Processes of their own count
    what is guessed in each way."""
    ways = _ways(options)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, os.cpu_count() or 2), spawned) as pool:
        counting = {
            name: [
                [pool.submit(_count, prompts, tokens, way, of, seed) for seed in range(_seeds(way))]
                for of in (draft, None)
            ]
            for name, way in ways.items()
        }
        rows: Rows = []
        for name, counted in counting.items():
            sides = [np.concatenate([part.result() for part in parts]) for parts in counted]
            rows.append({"options": name, **_compared(*sides)})
            print(rows[-1], flush=True)
    return rows


def _ways(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Way]:
    coupled = {name: Way(0.7, options=_sampling(chosen)) for name, chosen in options.items()}
    kinds = {"rejection": PLAIN, "rejection, all": "all"}
    rejecting = {
        name: Way(0.7, Verification.REJECTION, options=_sampling(options[of]))
        for name, of in kinds.items()
    }
    return coupled | rejecting


def _seeds(way: Way) -> int:
    return SEEDS[way.verification]


def _count(prompts: int, tokens: int, way: Way, draft: MakeDraft | None, seed: int) -> Counts:
    made = draft() if draft is not None else None
    bench = Bench(prompts, _seeds(way), tokens, DEPTH, made)
    return bench.measure(way, BUDGET, lambda: Planner(DEPTH, BUDGET), seed)


def _sampling(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What of a request's options draws tokens, as the engine has it."""
    drawing = {name: value for name, value in chosen.items() if name != "top_logprobs"}
    if "logit_bias" in drawing:
        drawing["logit_bias"] = tuple(sorted(drawing["logit_bias"].items()))
    return drawing


def _compared(*counts: Counts) -> dict[str, Any]:
    sums = [each.sum(axis=0) for each in counts]
    (hits, hits_cpu), (tokens, tokens_cpu) = (
        [float(statistic(each)) for each in sums] for statistic in (HIT_RATE, PER_ROUND)
    )
    points, share = hits - hits_cpu, tokens / tokens_cpu
    row: dict[str, Any] = {
        "hit rate": hits,
        "on the CPU": hits_cpu,
        "points": 100 * points,
        "tokens/round": tokens,
        "tokens/round, CPU": tokens_cpu,
        "of the CPU's": share,
    }
    if abs(points) > MOST_POINTS or abs(share - 1) > MOST_SHARE:
        row[FAILED] = "guesses otherwise than on the CPU"
    return row


def draft_on_gpu() -> ModelRunner:
    return engines.load_runner(
        DRAFT,
        HEAD,
        exact=False,
        step_rows=DRAFT_DEPTH + 1,
        branches=BUDGET,
        ranks=RANKS + 1,
        max_tail=DRAFT_DEPTH + (DRAFT_DEPTH + 1) * BUDGET,
        max_path=2 * DRAFT_DEPTH + 1,
        max_num_seqs=SEQUENCES,
        max_forward_tokens=2048,
        num_kv_blocks=4096,
    )
