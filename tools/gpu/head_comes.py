"""How long streams wait while a head comes: the target captures its steps once more, and serves.

Streams decode as they come; then a head links, which reads hidden states and all of the text so
far. From then on each step has one graph captured before it, until all are there and the head is
told. Timed is how long after the tokens of a step those of the next one come. Every turn asks for
other boundaries, so that every turn captures. On a CPU, where nothing is captured, the section is
only rehearsed.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.tensor_plane.host_rows import host_copies
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import FeatureOptions, Mode
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from tools.gpu import engines, features
from tools.gpu.features import DEPTH, Place, ReadingDraft
from tools.gpu.report import FAILED, Rows
from tools.gpu.shapes import SHAPES

STALL_LIMIT_MS = 20.0
STREAMS = 4
BEFORE = 40  # steps, until the head comes
FIRST = 8  # of these, which read prompts, or are the first of their kind
SHIFTS = (0, 1, -1)  # of the boundaries, turn by turn

GPU = replace(features.GPU, tokens=600)
SMALL = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=4200,
)
REHEARSED = Place(
    device="cpu",
    dtype="float32",
    shape={**SHAPES[features.SHAPE], **SMALL},
    boundaries=(1, 2),
    length=1024,
    tokens=90,
    has_limits=False,
)


@dataclass
class Waits:
    """Milliseconds between the tokens of two steps: before the head came, until it was told, and
    then."""

    before: list[float] = field(default_factory=list)
    meanwhile: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def head_comes(place: Place | None = None) -> Rows:
    place = place or (GPU if torch.cuda.is_available() else REHEARSED)
    runner = features._load(place)
    with torch.inference_mode():
        texts = _plain_texts(runner, place)
        rows: Rows = []
        for shift in SHIFTS:
            asked = tuple(boundary + shift for boundary in place.boundaries)
            rows.append(_turn(runner, replace(place, boundaries=asked), texts))
    return rows


def _plain_texts(runner: ModelRunner, place: Place) -> dict[int, list[int]]:
    core = engines.make_core(runner)
    _submit(core, place, Mode.OFF)
    return engines.run(core).tokens


def _submit(core: EngineCore, place: Place, mode: Mode) -> None:
    for i in range(STREAMS):
        engines.submit(core, i, engines.prompt(i), place.tokens, mode, engines.SAMPLED)


def _turn(runner: ModelRunner, place: Place, texts: dict[int, list[int]]) -> dict[str, Any]:
    runner.watch(())
    draft = ReadingDraft(DEPTH, place.needs)
    core = _core(runner, place, draft)
    for number, text in texts.items():
        draft.texts[number] = engines.prompt(number) + text
    _submit(core, place, Mode.SSD)
    gc.collect()
    waits, got = _serve(core, draft)
    draft.reader.close()
    row = _row(place, waits)
    if got != texts:
        row[FAILED] = "a text has changed"
    elif not draft.reader.told:
        row[FAILED] = "the head was told nothing"
    return row


def _core(runner: ModelRunner, place: Place, draft: ReadingDraft) -> EngineCore:
    options = FeatureOptions(place.shape["hidden_size"])
    feed = FeatureFeed(options, copies=host_copies(torch.device(place.device)))
    about: dict[str, Any] = {"open_features": lambda up, plane: draft.reader, "feed": feed}
    kind = partial(SpeculationCoordinator, **about)
    draft.core = engines.make_core(runner, draft.send, DEPTH, kind)
    return draft.core


def _serve(core: EngineCore, draft: ReadingDraft) -> tuple[Waits, dict[int, list[int]]]:
    waits, got = Waits(), dict[int, list[int]]()
    steps, last = 0, time.monotonic()
    while core.has_work:
        if steps == BEFORE:
            draft.join(core)
        told_before = bool(core.speculator.feed.watched)
        deltas = core.step().deltas
        for delta in deltas:
            got.setdefault(delta.sequence, []).extend(delta.tokens)
        if not any(delta.tokens for delta in deltas):
            continue
        now, steps = time.monotonic(), steps + 1
        kind = waits.after if told_before else waits.meanwhile if steps > BEFORE else waits.before
        kind.append(1e3 * (now - last))
        last = now
    return waits, got


def _row(place: Place, waits: Waits) -> dict[str, Any]:
    usual = statistics.median(waits.before[FIRST:])
    stall = _longest(waits.meanwhile) - usual
    row: dict[str, Any] = {
        "boundaries": " ".join(map(str, place.boundaries)),
        "between steps, median ms": usual,
        "longest": _longest(waits.before[FIRST:]),
        "steps until the head is told": len(waits.meanwhile),
        "median of these": statistics.median(waits.meanwhile or [0.0]),
        "longest of these": _longest(waits.meanwhile),
        "stall, ms": stall,
        "limit": STALL_LIMIT_MS,
        "longest once it is told": _longest(waits.after),
    }
    if place.has_limits and stall > STALL_LIMIT_MS:
        row[FAILED] = f"streams wait {stall:.1f} ms longer, {STALL_LIMIT_MS} allowed"
    return row


def _longest(waits: Sequence[float]) -> float:
    return max(waits, default=0.0)
