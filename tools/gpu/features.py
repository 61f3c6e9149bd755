"""What it costs a target that a head reads its hidden states: steps, gaps and prompts.

Each is timed with a reader and without, in turns on one model: the shape of 8B, every weight of
which counts. What was told is held against the features of a prefill of the same text. A head of
the same shape tells how long a drafted token takes, by captured steps and kernel by kernel.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
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
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.speculation.frames import DraftFrame, FeatureRequest, Open, Plane, TargetFrame
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.host_rows import host_copies
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey, check_rows
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_target.engine.core import EngineCore
from ssd_target.records.engine_records import DraftFrames, DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, Mode
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from tools.gpu import engines
from tools.gpu.check import random_weights
from tools.gpu.report import FAILED
from tools.gpu.report import Rows as Table
from tools.gpu.shapes import SHAPES

SHAPE = "llama-3.1-8b"
DEPTH = 7
BATCH, CHUNK = 8, 512
CONTEXT = 300
STEP_LIMIT, GAP_LIMIT_MS, PREFILL_LIMIT = 1.01, 0.2, 1.05
ROUNDING = 0.05  # of all features of a text together, computed in steps and by a prefill


@dataclass(frozen=True)
class Place:
    """On a CPU, with a small shape, the section is only rehearsed."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    shape: Mapping[str, Any] = field(default_factory=lambda: SHAPES[SHAPE])
    boundaries: tuple[int, ...] = (2, 16, 29)
    draft_vocab: int = 32_000
    length: int = 4096
    turns: int = 5
    repeats: int = 30
    tokens: int = 300
    has_limits: bool = True  # what takes too long fails

    @property
    def needs(self) -> FeatureNeeds:
        return FeatureNeeds(self.boundaries, self.shape["hidden_size"], self.dtype)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


GPU = Place()


class HostReader:
    """A sender whose thread makes rows as that of a plane does; they are kept, with the positions
    of the first of them."""

    came_up, reason, state = True, "", PlaneState.UP

    def __init__(self, needs: FeatureNeeds) -> None:
        self.stream = told_features(needs)
        self.told: list[tuple[int, Tensor]] = []
        self._handed: SimpleQueue[tuple[RowsKey, MakeRows] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def has_room(self, num_rows: int) -> bool:
        return True

    def send_made(
        self, key: RowsKey, make: MakeRows, num_rows: int = 0, complete: bool = False
    ) -> bool:
        self._handed.put((key, make))
        return True

    def close(self) -> None:
        self._handed.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (handed := self._handed.get()) is not None:
            key, make = handed
            rows = make()
            check_rows(self.stream, rows)
            self.told.append((key.round, rows.clone()))


class ReadingDraft(engines.PerfectDraft):
    """It asks for the features of all that it knows before."""

    def __init__(self, depth: int, needs: FeatureNeeds) -> None:
        super().__init__(depth)
        self._needs, self.reader = needs, HostReader(needs)

    def join(self, core: EngineCore) -> None:
        terms = FeatureTerms(self._needs)
        about = (self.LINK, self.EPOCH, False, 1024, 1 << 20, self._depth)
        core.handle(DraftLinkUp(*about, features=terms))
        answer = PlaneAnswer(PlaneKind.TCP, "", b"", self.reader.stream)
        self._say(core, Plane(0, 0, answer))

    def send(self, link: int, epoch: int, frames: Rows[TargetFrame]) -> None:
        super().send(link, epoch, frames)
        for frame in frames:
            if isinstance(frame, Open) and self.core is not None:
                self._say(self.core, FeatureRequest(frame.sequence, frame.round, 0))

    def _say(self, core: EngineCore, frame: DraftFrame) -> None:
        core.handle_link(DraftFrames(self.LINK, self.EPOCH, [frame], None))


def features(place: Place = GPU) -> Table:
    runner = _load(place)
    begin = time.monotonic()
    runner.watch(place.boundaries)
    place.synchronize()
    seconds = time.monotonic() - begin
    rows: Table = [{"measured": "capture of steps that tell, s", "with": seconds}]
    with torch.inference_mode():
        widths = (1, DEPTH + 1)
        rows += [_step(runner, place, batch, width) for batch in (1, BATCH) for width in widths]
        rows += _rounds(runner, place)
        rows.append(_prefill(runner, place))
        del runner
        engines.free_memory()
        rows += [_head(place, captured) for captured in (True, False)]
    return rows


def _load(place: Place) -> ModelRunner:
    options = RunnerOptions(
        directory=Path(),
        dtype=place.dtype,
        device=place.device,
        block_size=engines.BLOCK,
        max_model_len=place.length + 512,
        max_num_seqs=BATCH,
        max_forward_tokens=CHUNK,
        num_kv_blocks=(place.length + 1024) // engines.BLOCK * 2,
        step_rows=DEPTH + 1,
    )
    return ModelRunner(parse_model_config(dict(place.shape)), options, SingleRank(), random_weights)


def _compared(place: Place, what: str, without: float, told: float, limit: float) -> dict[str, Any]:
    row: dict[str, Any] = {"measured": what, "without": without, "with": told}
    row |= {"ratio": told / without, "limit": limit}
    if place.has_limits and told > limit * without:
        row[FAILED] = f"{what}: {told / without:.3f} times as long with features, {limit} allowed"
    return row


def _step(runner: ModelRunner, place: Place, batch: int, width: int) -> dict[str, Any]:
    size = CONTEXT // engines.BLOCK + 2
    tables = [list(range(i * size, (i + 1) * size)) for i in range(batch)]
    runner.watch(())
    for table in tables:
        engines.fill_context(runner, CONTEXT, table)
    parts = [Chunk([7 + i for i in range(width)], CONTEXT, table, width) for table in tables]
    draws = [Draw.of(engines.GREEDY, 100)] * (batch * width)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * place.turns):
        watched = bool(turn % 2)
        runner.watch(place.boundaries if watched else ())
        for repeat in range(place.repeats + 5):
            result = runner.step(parts, draws).result()
            if watched and repeat == 0 and result.features is None:
                raise RuntimeError("a step that is watched tells no features")
            if repeat >= 5:
                times[watched].append(1e3 * result.seconds)
    without, told = (statistics.median(times[each]) for each in (False, True))
    return _compared(place, f"step of {batch} x {width} rows, ms", without, told, STEP_LIMIT)


def _rounds(runner: ModelRunner, place: Place) -> Table:
    """Rounds that all hit, sampled as requests come, and what was told of their text. Features go
    all the way to a thread of this process, which has them in the host's memory."""
    tokens, how = engines.prompt(1), {"sampling": engines.SAMPLED}
    runner.watch(())
    core = engines.make_core(runner)
    engines.submit(core, 1, tokens, place.tokens, **how)
    text = engines.run(core).tokens[1]
    rows: Table = []
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(6):  # the first two are to warm up
        watched = bool(turn % 2)
        draft = ReadingDraft(DEPTH, place.needs) if watched else engines.PerfectDraft(DEPTH)
        core = _core(runner, place, draft)
        draft.core, draft.texts[1] = core, tokens + text
        engines.submit(core, 1, tokens, place.tokens, mode=Mode.SSD, **how)
        gc.collect()
        ran = engines.run(core)
        if turn > 1:
            gaps[watched] += [1e3 * gap for gap in ran.gaps[1:]]
        if ran.tokens[1] != text:
            rows.append({"measured": "text", FAILED: f"the text has changed (features {watched})"})
        if isinstance(draft, ReadingDraft):
            draft.reader.close()
            if turn == 5:
                rows.append(_check_told(runner, place, draft.reader.told, tokens + text))
    without, told = (statistics.median(gaps[each]) for each in (False, True))
    row: dict[str, Any] = {"measured": "gap on a hit, median ms", "without": without, "with": told}
    row["limit"] = GAP_LIMIT_MS
    if place.has_limits and told > GAP_LIMIT_MS:
        row[FAILED] = f"a gap of {told:.3f} ms with features, {GAP_LIMIT_MS} allowed"
    return [row, *rows]


def _core(runner: ModelRunner, place: Place, draft: engines.PerfectDraft) -> EngineCore:
    """A new engine with this draft, whose steps are captured already."""
    if not isinstance(draft, ReadingDraft):
        runner.watch(())
        core = engines.make_core(runner, draft.send, DEPTH)
        core.handle(draft.up())
        return core
    runner.watch(place.boundaries)
    reader, options = draft.reader, FeatureOptions(place.shape["hidden_size"])
    feed = FeatureFeed(options, copies=host_copies(torch.device(place.device)))
    about: dict[str, Any] = {"open_features": lambda up, plane: reader, "feed": feed}
    kind = partial(SpeculationCoordinator, **about)
    core = engines.make_core(runner, draft.send, DEPTH, kind)
    draft.join(core)
    return core


def _check_told(
    runner: ModelRunner, place: Place, told_rows: Rows[tuple[int, Tensor]], text: list[int]
) -> dict[str, Any]:
    """Every position once, in order, as a prefill computes it; but for those of the last round, for
    which nobody asks any more."""
    place.synchronize()
    ends = [start + len(rows) for start, rows in told_rows]
    told = torch.cat([rows for _, rows in told_rows])
    row: dict[str, Any] = {"measured": f"rows told of {len(text) - 1} positions", "with": len(told)}
    if [start for start, _ in told_rows] != [0, *ends[:-1]]:
        row[FAILED] = "positions are told twice, or not at all"
        return row
    if not 0 <= len(text) - 1 - len(told) <= DEPTH + 1:
        row[FAILED] = f"{len(told)} rows were told of {len(text) - 1} positions"
        return row
    pieces = []
    blocks = list(range(len(text) // engines.BLOCK + 1))
    for start in range(0, len(told), CHUNK):
        runner.forward([Chunk(text[: len(told)][start : start + CHUNK], start, blocks, 0)])
        if runner.features is not None:
            pieces.append(runner.features)
    expected = torch.cat(pieces).float().cpu()
    row["off by"] = off = float((told.float() - expected).norm() / expected.norm())
    row["limit"] = ROUNDING
    if not off <= ROUNDING:
        row[FAILED] = f"features of steps are {off:.3g} off those of a prefill"
    return row


def _prefill(runner: ModelRunner, place: Place) -> dict[str, Any]:
    length = place.length
    blocks, tokens = list(range(length // engines.BLOCK)), engines.prompt(3, length)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(10):
        watched = bool(turn % 2)
        runner.watch(place.boundaries if watched else ())
        place.synchronize()
        begin, told = time.monotonic(), deque[Tensor | None]()
        for start in range(0, length, CHUNK):
            last = start + CHUNK >= length
            runner.forward([Chunk(tokens[start : start + CHUNK], start, blocks, int(last))])
            told.append(runner.features)
        place.synchronize()
        if turn > 1:
            times[watched].append(1e3 * (time.monotonic() - begin))
    without, told_ms = (statistics.median(times[each]) for each in (False, True))
    return _compared(place, f"prompt of {place.length} tokens, ms", without, told_ms, PREFILL_LIMIT)


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
        tokens = torch.arange(head.draft_vocab_size, device=device) * 4  # some of the target's
        self._weights = HeadWeights(
            replace(made, layers=[first], head=lm_head),
            matrix(width, head.feature_width),
            [],
            torch.ones(width, dtype=dtype, device=device),
            tokens,
        )
        return self._weights.decoder


def _head(place: Place, captured: bool) -> dict[str, Any]:
    """A token of one sequence, and what is told after a round in which all was right."""
    layers = parse_model_config({**place.shape, "num_hidden_layers": 1})
    config = HeadConfig(
        layers=layers,
        target_hidden_size=layers.hidden_size,
        boundaries=place.boundaries,
        num_features=len(place.boundaries),
        draft_vocab_size=place.draft_vocab,
        feature_norm=FeatureNorm.NONE,
        norm_before_residual=False,
        norm_output=False,
        verifier="",
    )
    options = RunnerOptions(
        directory=Path(),
        dtype=place.dtype,
        device=place.device,
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
    blocks, told = list(range(32)), torch.randn(CONTEXT, config.feature_width, device=place.device)
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
