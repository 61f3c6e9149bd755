"""Engines inside this process, for times without a network: a runner, a core, a perfect draft."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import grow_config, parse_shape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, Draw, Part, TreeRows
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Branch, Branches, Close, Launch, Open, TargetFrame
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens, unpack_tokens
from ssd_target.config import TargetConfig
from ssd_target.engine.core import EngineCore
from ssd_target.records.engine_records import DraftFrames, DraftLinkUp, Submit
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator

BLOCK = 16
COPY_BANDWIDTH = 4.3e12  # bytes/s, read plus written, of a large copy on an H200
PROMPT_TOKENS, NEW_TOKENS = 64, 256
MAX_NUM_SEQS = TargetConfig.max_num_seqs  # as it comes
# As requests come: nearly every chat model ships with such options.
SAMPLING: dict[str, Any] = dict(temperature=0.7, top_p=0.9, top_k=20)
GREEDY = SamplingParams(7, 0.0)
SAMPLED = SamplingParams(7, **SAMPLING)


def load_runner(model: str, shape: str, **options: Any) -> ModelRunner:
    directory = resolve_model(model)
    settings: dict[str, Any] = {
        "directory": directory,
        "dtype": "bfloat16",
        "device": "cuda",
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": 1,
        "max_forward_tokens": 512,
        "expand_to": parse_shape(shape),
        "step_rows": 8,
        **options,
    }
    return ModelRunner(load_model_config(directory), RunnerOptions(**settings), SingleRank())


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def step_bytes(model: str, shape: str) -> int:
    """Weights that one step reads: all but the rows of the embedding that it does not look up."""
    config = grow_config(load_model_config(resolve_model(model)), parse_shape(shape))
    sizes = expected_shapes(config)
    total = sum(torch.Size(size).numel() for size in sizes.values())
    if not config.tie_word_embeddings:
        total -= torch.Size(sizes["model.embed_tokens.weight"]).numel()
    return 2 * total


def make_core(
    runner: ModelRunner,
    send: Any = None,
    depth: int = 7,
    kind: Callable[..., SpeculationCoordinator] = SpeculationCoordinator,
) -> EngineCore:
    options = SpeculationOptions(depth=depth, adapt_depth=False, auto_off=False)
    size = runner.config.vocab_size
    speculator = kind(options, size, **({} if send is None else {"send": send}))
    return EngineCore(
        runner,
        [b""] * size,
        BLOCK,
        runner.options.max_num_seqs,
        runner.options.max_forward_tokens,
        speculator,
        replay_rows=runner.options.step_rows if runner.options.exact else 0,
    )


def prompt(number: int, length: int = PROMPT_TOKENS) -> list[int]:
    return [10 + (37 * i + 101 * number) % 4000 for i in range(length)]


def submit(
    core: EngineCore,
    number: int,
    tokens: list[int],
    new: int,
    mode: Mode = Mode.OFF,
    sampling: SamplingParams = GREEDY,
) -> None:
    core.handle(
        Submit(
            number,
            pack_tokens(tokens),
            b"",
            sampling,
            StopRules(new),
            None,
            SpeculationRequest(mode, depth=7),
        )
    )


@dataclass
class Ran:
    seconds: float
    tokens: dict[int, list[int]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # seconds, before each round's forward
    forwards: list[float] = field(default_factory=list)


def run(core: EngineCore) -> Ran:
    """Step until all have ended."""
    ran = Ran(0.0)
    begin = time.monotonic()
    forwards, forward_seconds, gap_seconds = 0, 0.0, 0.0
    while core.has_work:
        output = core.step()
        for delta in output.deltas:
            ran.tokens.setdefault(delta.sequence, []).extend(delta.tokens)
        stats = output.stats
        if stats.forwards > forwards:
            ran.forwards.append(stats.forward_seconds - forward_seconds)
            ran.gaps.append(stats.gap_seconds - gap_seconds)
        forwards, forward_seconds = stats.forwards, stats.forward_seconds
        gap_seconds = stats.gap_seconds
    ran.seconds = time.monotonic() - begin
    return ran


def time_step(
    runner: ModelRunner,
    parts: Sequence[Part],
    sampling: SamplingParams = GREEDY,
    repeats: int = 60,
) -> float:
    """Median milliseconds of a step, by the device's clock."""
    rows = sum(part.num_logits for part in parts)
    draws = [Draw.of(sampling, 100)] * rows
    times = [runner.step(parts, draws).result().seconds for _ in range(repeats)]
    return 1e3 * statistics.median(times[5:])


def fill_context(runner: ModelRunner, length: int, blocks: list[int]) -> None:
    chunk = runner.options.max_forward_tokens
    for start in range(0, length, chunk):
        tokens = [5] * min(chunk, length - start)
        runner.forward([Chunk(tokens, start, blocks, 0)])


def tree_rows(context: int, branches: int, depth: int, blocks: list[int], first: int) -> TreeRows:
    """One depth of a tree whose scratch begins at block ``first``."""
    scratch = [first * BLOCK + i for i in range(branches * (depth + 1))]
    return TreeRows(
        [7] * branches,
        [context + depth] * branches,
        [context - 1] * branches,
        scratch[-branches:],
        context,
        blocks,
        scratch,
    )


class PerfectDraft:
    """An endpoint that knows the text, and has every next speculation ready at once."""

    LINK, EPOCH = 1, 1

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.texts: dict[int, list[int]] = {}  # whole texts, by sequence
        self._committed: dict[int, int] = {}
        self._verified: dict[int, int] = {}
        self.core: EngineCore | None = None

    def up(self) -> DraftLinkUp:
        return DraftLinkUp(self.LINK, self.EPOCH, False, 1024, 1 << 20, self._depth)

    def send(self, link: int, epoch: int, frames: Sequence[TargetFrame]) -> None:
        answers = [answer for frame in frames if (answer := self._answer(frame)) is not None]
        if answers and self.core is not None:
            self.core.handle_link(DraftFrames(self.LINK, self.EPOCH, answers, None))

    def _answer(self, frame: TargetFrame) -> Branches | None:
        key = frame.sequence
        if isinstance(frame, Open):
            self._committed[key] = len(unpack_tokens(frame.prompt) + unpack_tokens(frame.output))
        elif isinstance(frame, Launch):
            self._committed[key] += self._verified[key] + 1  # all of it was right
        if isinstance(frame, Close) or not isinstance(frame, Open | Launch):
            return None
        self._verified[key] = len(frame.speculation)
        at, text = self._committed[key] + len(frame.speculation), self.texts[key]
        if at >= len(text):
            return None
        tokens = text[at + 1 : at + 1 + self._depth]
        return Branches(key, frame.round, [Branch(len(frame.speculation), text[at], 0, tokens)])
