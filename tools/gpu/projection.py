"""Separate GPUs, projected: each side timed alone on this one, combined by theorem 7."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from ssd_engine.batch import Chunk, Draw
from ssd_engine.fan_out import theorem7
from ssd_engine.runner import ModelRunner
from tools.bench_overlap import DraftAlone, time_rounds
from tools.gpu import engines
from tools.gpu.report import Rows
from tools.gpu.serving import PAIRS

BUDGET = 24
CONTEXT = 300


def project(folder: Path) -> Rows:
    """Rates are those of the section modes, in the same folder."""
    measured = json.loads((folder / "modes.json").read_text())["rows"]
    return [_project(target, draft, measured) for target, draft in PAIRS]


def _project(target: str, draft: str, measured: Rows) -> dict[str, Any]:
    rows = {row["mode"]: row for row in measured if row["pair"] == f"{target}, {draft}"}
    sync, ssd = rows["sync"], rows["ssd"]
    verify = _verify_ms(target)
    drafting = _sync_ms(draft, sync["K"])
    tree, backup = _draft_ms(draft, ssd["K"])
    turns = drafting / verify
    p, e_hit, e_miss = ssd["from the cache"], ssd["E_hit"], ssd["E_miss"] or 1.0
    sync_rate = sync["tokens/round"] / (1e-3 * verify * (1 + turns))
    ssd_rate = theorem7(p, e_hit, e_miss, 1e-3 * verify, tree / verify, backup / verify)
    ceiling = (1 + turns) * e_hit / sync["tokens/round"]
    return {
        "projection": f"{target}, {draft} on GPUs of their own",
        "T_v, ms": verify,
        "K sync": sync["K"],
        "T_SD": turns,
        "E_SD": sync["tokens/round"],
        "K ssd": ssd["K"],
        "T_p": tree / verify,
        "T_b": backup / verify,
        "p": p,
        "E_hit": e_hit,
        "E_miss": e_miss,
        "off, tokens/s": 1e3 / verify,
        "sync, tokens/s": sync_rate,
        "ssd, tokens/s": ssd_rate,
        "ssd / sync": ssd_rate / sync_rate,
        "ceiling": ceiling,
        "of the ceiling": ssd_rate / sync_rate / ceiling,
    }


def _verify_ms(shape: str) -> float:
    runner = engines.load_runner("stories-target", shape)
    blocks = list(range(32))
    engines.fill_context(runner, CONTEXT, blocks)
    ms = engines.time_step(runner, [Chunk([7] * 8, CONTEXT, blocks, 8)])
    del runner
    engines.free_memory()
    return ms


def _sync_ms(shape: str, depth: int) -> float:
    """The draft's turn in synchronous speculation, the host's part included."""
    runner = engines.load_runner("stories-draft", shape, exact=False, step_rows=2)
    blocks = list(range(32))
    engines.fill_context(runner, CONTEXT, blocks)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for i in range(depth):
            _next_token(runner, blocks, i)
        times.append(time.perf_counter() - begin)
    del runner
    engines.free_memory()
    return 1e3 * statistics.median(times[3:])


def _next_token(runner: ModelRunner, blocks: list[int], at: int) -> int:
    chunk = Chunk([7], CONTEXT + at, blocks, 1)
    drawn = runner.step([chunk], [Draw(1, 0.0, CONTEXT + at + 1)]).result().drawn
    if drawn is None:
        raise SystemExit("the device has drawn nothing")
    return drawn[0]


def _draft_ms(shape: str, depth: int) -> tuple[float, float]:
    runner = engines.load_runner(
        "stories-draft",
        shape,
        exact=False,
        step_rows=depth + 1,
        branches=BUDGET,
        ranks=17,
        max_tail=BUDGET * (depth + 1) + depth,
        max_num_seqs=8,
    )
    times = time_rounds(DraftAlone(runner, depth, BUDGET))
    del runner
    engines.free_memory()
    return times
