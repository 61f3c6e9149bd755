"""What it costs a target that a head reads its hidden states: steps, gaps and prompts.

Each is timed with a reader and without, in turns on one model: the shape of 8B, every weight of
which counts. What was told is held against the features of a prefill of the same text.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import parse_model_config
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, Draw
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_target.records.speculation_options import Mode
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator
from tools.gpu import engines
from tools.gpu.check import random_weights
from tools.gpu.report import FAILED
from tools.gpu.report import Rows as Table
from tools.gpu.shapes import SHAPES

SHAPE = "llama-3.1-8b"
BOUNDARIES = (2, 16, 29)
DEPTH = 7
BATCH, LENGTH, CHUNK = 8, 4096, 512
CONTEXT = 300
TURNS, REPEATS = 5, 30
STEP_LIMIT, GAP_LIMIT_MS, PREFILL_LIMIT = 1.01, 0.2, 1.05
ROUNDING = 0.05  # of all features of a text together, computed in steps and by a prefill
TOKENS = 300


class ReadingCoordinator(SpeculationCoordinator):
    """A linked draft that reads features: the rows that outcomes accepted, as they would travel."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self.told: deque[tuple[int, Tensor]] = deque()  # positions of the first rows

    @property
    def reads_features(self) -> bool:
        return True

    def tell_features(self, works: Rows[Work], features: Tensor | None) -> None:
        if features is None:
            raise RuntimeError("features that nobody has watched")
        begin = 0
        for work in works:
            start, count = work.chunk.start, len(work.chunk.tokens)
            right = min(count, work.sequence.num_committed - 1 - start)
            self.told.append((start, features[begin : begin + right].contiguous()))
            begin += count


def features() -> Table:
    runner = _load()
    begin = time.monotonic()
    runner.watch(BOUNDARIES)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    rows: Table = [{"measured": "capture of steps that tell, s", "with": seconds}]
    with torch.inference_mode():
        rows += [_step(runner, batch, width) for batch in (1, BATCH) for width in (1, DEPTH + 1)]
        rows += _rounds(runner)
        rows.append(_prefill(runner))
    return rows


def _load() -> ModelRunner:
    options = RunnerOptions(
        directory=Path(),
        dtype="bfloat16",
        device="cuda",
        block_size=engines.BLOCK,
        max_model_len=LENGTH + 512,
        max_num_seqs=BATCH,
        max_forward_tokens=CHUNK,
        num_kv_blocks=(LENGTH + 1024) // engines.BLOCK * 2,
        step_rows=DEPTH + 1,
    )
    return ModelRunner(parse_model_config(SHAPES[SHAPE]), options, SingleRank(), random_weights)


def _compared(what: str, without: float, told: float, limit: float, **more: Any) -> dict[str, Any]:
    row = {"measured": what, "without": without, "with": told, "ratio": told / without}
    row |= {"limit": limit, **more}
    if told > limit * without:
        row[FAILED] = f"{what}: {told / without:.3f} times as long with features, {limit} allowed"
    return row


def _step(runner: ModelRunner, batch: int, width: int) -> dict[str, Any]:
    size = CONTEXT // engines.BLOCK + 2
    tables = [list(range(i * size, (i + 1) * size)) for i in range(batch)]
    runner.watch(())
    for table in tables:
        engines.fill_context(runner, CONTEXT, table)
    parts = [Chunk([7 + i for i in range(width)], CONTEXT, table, width) for table in tables]
    draws = [Draw.of(engines.GREEDY, 100)] * (batch * width)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * TURNS):
        watched = bool(turn % 2)
        runner.watch(BOUNDARIES if watched else ())
        for repeat in range(REPEATS + 5):
            result = runner.step(parts, draws).result()
            if watched and repeat == 0 and result.features is None:
                raise RuntimeError("a step that is watched tells no features")
            if repeat >= 5:
                times[watched].append(1e3 * result.seconds)
    without, told = (statistics.median(times[each]) for each in (False, True))
    return _compared(f"step of {batch} x {width} rows, ms", without, told, STEP_LIMIT)


def _rounds(runner: ModelRunner) -> Table:
    """Rounds that all hit, sampled as requests come; the text, and what was told of it."""
    tokens, how = engines.prompt(1), {"sampling": engines.SAMPLED}
    runner.watch(())
    core = engines.make_core(runner)
    engines.submit(core, 1, tokens, TOKENS, **how)
    text = engines.run(core).tokens[1]
    rows: Table = []
    gaps: dict[bool, list[float]] = {False: [], True: []}
    coordinators = {False: SpeculationCoordinator, True: ReadingCoordinator}
    for turn in range(6):  # the first two are to warm up
        watched = bool(turn % 2)
        runner.watch(BOUNDARIES if watched else ())
        draft = engines.PerfectDraft(DEPTH)
        core = engines.make_core(runner, draft.send, DEPTH, coordinators[watched])
        draft.core, draft.texts[1] = core, tokens + text
        core.handle(draft.up())
        engines.submit(core, 1, tokens, TOKENS, mode=Mode.SSD, **how)
        gc.collect()
        ran = engines.run(core)
        if turn > 1:
            gaps[watched] += [1e3 * gap for gap in ran.gaps[1:]]
        if ran.tokens[1] != text:
            rows.append({"measured": "text", FAILED: f"the text has changed (features {watched})"})
        if isinstance(core.speculator, ReadingCoordinator) and turn == 5:
            rows.append(_check_told(runner, core.speculator, tokens + text))
    without, told = (statistics.median(gaps[each]) for each in (False, True))
    row: dict[str, Any] = {"measured": "gap on a hit, median ms", "without": without, "with": told}
    row["limit"] = GAP_LIMIT_MS
    if told > GAP_LIMIT_MS:
        row[FAILED] = f"a gap of {told:.3f} ms with features, {GAP_LIMIT_MS} allowed"
    return [row, *rows]


def _check_told(
    runner: ModelRunner, coordinator: ReadingCoordinator, text: list[int]
) -> dict[str, Any]:
    """Every position once, in order, as a prefill computes it."""
    torch.cuda.synchronize()
    ends = [start + len(rows) for start, rows in coordinator.told]
    told = torch.cat([rows for _, rows in coordinator.told])
    row: dict[str, Any] = {"measured": f"rows told of {len(text) - 1} positions", "with": len(told)}
    if [start for start, _ in coordinator.told] != [0, *ends[:-1]]:
        row[FAILED] = "positions are told twice, or not at all"
        return row
    pieces = []
    blocks = list(range(len(text) // engines.BLOCK + 1))
    for start in range(0, len(told), CHUNK):
        runner.forward([Chunk(text[: len(told)][start : start + CHUNK], start, blocks, 0)])
        if runner.features is not None:
            pieces.append(runner.features)
    expected = torch.cat(pieces).float()
    row["off by"] = off = float((told.float() - expected).norm() / expected.norm())
    row["limit"] = ROUNDING
    if not off <= ROUNDING:
        row[FAILED] = f"features of steps are {off:.3g} off those of a prefill"
    return row


def _prefill(runner: ModelRunner) -> dict[str, Any]:
    blocks, tokens = list(range(LENGTH // engines.BLOCK)), engines.prompt(3, LENGTH)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(10):
        watched = bool(turn % 2)
        runner.watch(BOUNDARIES if watched else ())
        torch.cuda.synchronize()
        begin, told = time.monotonic(), deque[Tensor | None]()
        for start in range(0, LENGTH, CHUNK):
            last = start + CHUNK == LENGTH
            runner.forward([Chunk(tokens[start : start + CHUNK], start, blocks, int(last))])
            told.append(runner.features)
        torch.cuda.synchronize()
        if turn > 1:
            times[watched].append(1e3 * (time.monotonic() - begin))
    without, told_ms = (statistics.median(times[each]) for each in (False, True))
    return _compared(f"prompt of {LENGTH} tokens, ms", without, told_ms, PREFILL_LIMIT)
