"""What it costs a target that a head reads its hidden states: steps, gaps and prompts.

Each is timed with a reader and without, in turns on one model: the shape of 8B, every weight of
which counts. What was told is held against the features of a prefill of the same text. A head of
the same shape tells how long a drafted token takes, by captured steps and kernel by kernel.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_engine.checkpoints.heads.head_config import FeatureNorm, HeadConfig
from ssd_engine.checkpoints.model_config import ModelConfig, parse_model_config
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, Draw
from ssd_engine.models.decoder import DecoderWeights
from ssd_engine.models.eagle_head import HeadWeights
from ssd_engine.models.tensor_parallel import SingleRank, TensorParallel
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
        del runner
        engines.free_memory()
        rows += [_head(captured) for captured in (True, False)]
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


class RandomHead(HeadRunner):
    """Dense random weights in place of a checkpoint's."""

    def _load(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> DecoderWeights:
        head, made = self._config, random_weights(config, tp, dtype, device)

        def matrix(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device).mul_(sizes[-1] ** -0.5).to(dtype)

        first, width = made.layers[0], config.hidden_size
        first = replace(first, qkv=matrix(len(first.qkv), 2 * width))
        lm_head = matrix(head.draft_vocab_size, width)
        tokens = torch.arange(head.draft_vocab_size, device=device) * 4
        self._weights = HeadWeights(
            replace(made, layers=[first], head=lm_head),
            matrix(width, head.feature_width),
            [],
            torch.ones(width, dtype=dtype, device=device),
            tokens,
        )
        return self._weights.decoder


def _head(captured: bool) -> dict[str, Any]:
    """A token of one sequence, and what is told after a round in which all was right."""
    layers = parse_model_config({**SHAPES[SHAPE], "num_hidden_layers": 1})
    config = HeadConfig(
        layers=layers,
        target_hidden_size=layers.hidden_size,
        boundaries=BOUNDARIES,
        num_features=len(BOUNDARIES),
        draft_vocab_size=32_000,
        feature_norm=FeatureNorm.NONE,
        norm_before_residual=False,
        norm_output=False,
        verifier="",
    )
    options = RunnerOptions(
        directory=Path(),
        dtype="bfloat16",
        device="cuda",
        block_size=engines.BLOCK,
        max_model_len=2048,
        max_num_seqs=1,
        max_forward_tokens=CHUNK,
        num_kv_blocks=256,
        exact=False,
        step_rows=DEPTH + 1 if captured else 0,
        ranks=2,
        max_path=DEPTH,
    )
    checkpoint: Any = None
    heads = RandomHead(config, checkpoint, options, layers.vocab_size)
    blocks, told = list(range(32)), torch.randn(CONTEXT, config.feature_width, device="cuda")
    prompt = Chunk(engines.prompt(1, CONTEXT), 0, blocks, 1)
    heads.step_with_features([prompt], [None], GivenFeatures([CONTEXT], told)).result()
    times = []
    for count in (0, DEPTH + 1):
        chunk = Chunk(engines.prompt(2, max(1, count)), CONTEXT, blocks, 1)
        times.append(_drafted_ms(heads, chunk, GivenFeatures([count], told[:count])))
    how = "captured" if captured else "kernel by kernel"
    return {
        "measured": f"token of a head, {how}, ms",
        "without": times[0],
        "with": times[1],
    }


def _drafted_ms(heads: HeadRunner, chunk: Chunk, given: GivenFeatures) -> float:
    """Until its token is known here, as nothing goes on before that."""
    times, draws = [], [Draw.of(engines.GREEDY, CONTEXT + 10)]
    for _ in range(60):
        begin = time.monotonic()
        result = heads.step_with_features([chunk], draws, given).result()
        if result.following is None:
            result.logits.argmax(-1).tolist()
        times.append(1e3 * (time.monotonic() - begin))
    return statistics.median(times[10:])
