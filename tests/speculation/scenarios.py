"""Scenarios of speculation: requests, drafts and what goes wrong, held against plain decoding.

Every token that comes out of a scenario is compared with what an engine without speculation gives
for the same request and seed when it serves that request alone.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.head.speculator import HeadSpeculator
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.cache import KVCache
from ssd_engine.sampling.params import Logprobs, SamplingParams
from ssd_engine.sampling.sampler import SampleRow, perturbed_scores
from ssd_engine.speculation.frames import Source
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.scheduling.kept_kv import KeptOptions
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.head_drafter import HeadDrafter
from tests import clockwork
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run
from tests.random_models import LLAMA3_ROPE, SMALL, make_model
from tests.simulation import DRAFT_DEPTH, Faults, FewBlocks, Simulation

NEAR_TIE = 1e-5  # of the perturbed scores: a smaller gap excuses a difference
LOGPROB_TOLERANCE = 1e-4
NUM_BLOCKS = 256
VOCAB = 160  # of random models
MAX_DRAFTS = 3

# Models


@dataclass
class Pair:
    name: str
    target: ModelRunner
    drafts: list[ModelRunner]  # the same weights, a cache each; the last one is for sync
    token_bytes: list[bytes]

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size


def stories() -> Pair:
    directory = resolve_model("stories-target")
    spelling = Tokenizer(directory, load_model_config(directory)).token_bytes
    return _pair("stories", directory, resolve_model("stories-draft"), spelling)


def random_pair(family: str, kind: str, directory: Path) -> Pair:
    """A random target, and a draft that is a blurred copy of it or a smaller model."""
    torch.manual_seed(sum(map(ord, family + kind)))
    target = _random_model(family)
    target.save_pretrained(directory / "target")
    draft = _blurred(target) if kind == "blurred" else _random_model(family, **_SMALLER)
    draft.save_pretrained(directory / "draft")
    spelling = [bytes([97 + i % 26, 97 + i // 26]) for i in range(VOCAB)]
    return _pair(f"{family}, {kind}", directory / "target", directory / "draft", spelling)


_SMALLER: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=64)
BLUR = 0.03  # of a weight's spread: the draft is often right, and often not


def _random_model(family: str, **changes: Any) -> PreTrainedModel:
    size = {**SMALL, "vocab_size": VOCAB, "num_hidden_layers": 2, **changes}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**size, rope_parameters=LLAMA3_ROPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**size, head_dim=size["hidden_size"] // 8))
    return model.float().eval()


@torch.no_grad()
def _blurred(model: PreTrainedModel) -> PreTrainedModel:
    blurred = copy.deepcopy(model)
    for parameter in blurred.parameters():
        if parameter.dim() > 1:
            parameter += BLUR * parameter.std() * torch.randn_like(parameter)
    return blurred


def _pair(name: str, target: Path, draft: Path, spelling: list[bytes]) -> Pair:
    runner = make_runner(draft, NUM_BLOCKS)
    drafts = [runner, *(_with_own_cache(runner) for _ in range(MAX_DRAFTS))]
    return Pair(name, make_runner(target, NUM_BLOCKS), drafts, spelling)


def _with_own_cache(runner: ModelRunner) -> ModelRunner:
    other = copy.copy(runner)
    other.kv = KVCache(runner.kv.spec, runner.device)
    other.kv.allocate(runner.num_blocks)
    if isinstance(other, HeadRunner):
        other._states = copy.deepcopy(other._states)
    return other


def clockwork_pair(drafted: int, directory: Path) -> Pair:
    """A target, and a head that foresees its tokens, as many of them as it can draft."""
    clockwork.make_target(directory / "target")
    clockwork.make_head(directory / "head", drafted)
    return _head_pair(f"clockwork, {drafted} tokens", directory / "target", directory / "head")


def stories_with_head() -> Pair:
    """What ships: a head whose guesses depend on all that it has read."""
    target, head = resolve_model("stories-target"), resolve_model("stories-eagle")
    spelling = Tokenizer(target, load_model_config(target)).token_bytes
    return _head_pair("stories, head", target, head, spelling)


def dense_pair_with_head(family: str, kind: str, directory: Path) -> Pair:
    """Dense random weights on both sides. Kinds of heads are those of ``random_heads``."""
    random_heads = pytest.importorskip("tests.random_heads", exc_type=ImportError)
    make_model(family, directory / "target")
    random_heads.make_head(random_heads.KINDS[kind], directory / "head")
    return _head_pair(f"{family}, {kind}", directory / "target", directory / "head")


def _head_pair(
    name: str, target_at: Path, head_at: Path, spelling: list[bytes] | None = None
) -> Pair:
    target = make_runner(target_at, NUM_BLOCKS)
    config = fit_to_target(load_head_config(head_at), target.config, "target")
    checkpoint = open_head(head_at, config, target_at)
    vocab = target.config.vocab_size
    head = HeadRunner(config, checkpoint, replace(target.options, directory=head_at), vocab)
    spelling = spelling or [bytes([97 + i % 26, 97 + i // 26]) for i in range(vocab)]
    return Pair(name, target, [head, *(_with_own_cache(head) for _ in range(MAX_DRAFTS))], spelling)


# Scenarios


@dataclass(frozen=True)
class Asked:
    """A request, before the model is known."""

    prefix: int  # which of the shared beginnings
    suffix: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    to_block_end: bool  # so many more that the text ends with a block
    mode: Mode
    depth: int
    num_logprobs: int | None
    stop: str  # "", "token" or "string": one that its plain text meets
    stop_at: float  # where, as a share of that text
    resume: float  # share of the text that was generated before


@dataclass(frozen=True)
class Scenario:
    requests: tuple[Asked, ...]
    depth: int
    adapt_depth: bool
    backup: Backup
    wait_seconds: float | None
    fan_out: tuple[int, ...] | None
    budget: int
    draft_steps: tuple[int, int]  # of a draft during a forward of the target
    drafts: tuple[bool, ...]  # of each: whether it has a model, or looks up
    faults: Faults
    stagger: int
    goes_on: bool  # texts are prompts of a second wave
    feature_window: int  # positions
    keep_features: int  # bytes
    room: int  # KV blocks of the target
    draft_room: int
    kept: int  # KV blocks of those that are set aside, in the host's memory
    seed: int
    prefill_chunk: int = 128


PREFIX_LENGTHS = (1, 7, BLOCK, 2 * BLOCK + 1)
# Steps of a draft during a forward of the target, a backup that suits them, and the least depth.
SPEEDS = [
    ((12, 12), Backup.NONE, 1),
    ((12, 12), Backup.NGRAM, 2),
    ((9, 9), Backup.JUST_IN_TIME, 1),
    ((0, 12), Backup.AUTO, 6),
    ((3, 6), Backup.NONE, 6),
    ((2, 4), Backup.NONE, 5),
    ((1, 4), Backup.NGRAM, 5),
    ((0, 4), Backup.JUST_IN_TIME, 5),
    ((0, 0), Backup.NGRAM, 1),
]
# Zeros: lengths for which nothing is prepared.
FAN_OUTS = [None, (3, 2, 1), (2, 0), (2, 0, 1), (1, 0, 0, 2), (3, 1, 0), (1, 0), (0, 2)]
DRAFTS = [(True,), (True,), (True,), (True, True), (True, False, True), (False,)]  # with a model?
SIZES = [1, 2, 3, 4, 1, 2, 5, 8]


class Dice(random.Random):
    """The choices of one scenario. What is drawn in turn is drawn equally often."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")
        self._name, self._number = name, number

    def turn(self, what: str, values: Sequence[Any]) -> Any:
        """Each once in so many scenarios as there are values, in an order of its own."""
        cycle, at = divmod(self._number, len(values))
        return random.Random(f"{self._name} {what} {cycle}").sample(values, len(values))[at]


def draw_scenario(name: str, number: int, vocab_size: int) -> Scenario:
    dice = Dice(name, number)
    steps, backup, least = dice.turn("speed", SPEEDS)
    depth = max(least, dice.randint(1, 8))
    return Scenario(
        requests=tuple(_ask(dice, vocab_size, depth) for _ in range(dice.turn("size", SIZES))),
        depth=depth,
        adapt_depth=dice.choice([False, False, True]),
        backup=dice.choice([backup, backup, backup, *Backup]),
        wait_seconds=dice.turn("wait", [None, 0.02, 0.02, 0.002, 0.0]),
        fan_out=dice.turn("fan-out", FAN_OUTS),
        budget=dice.choice([16, 6, 1]),
        draft_steps=steps,
        drafts=dice.turn("drafts", DRAFTS),
        faults=dice.choice([Faults(), _draw_faults(dice)]),
        stagger=dice.choice([0, 0, 1, 3]),
        goes_on=dice.turn("goes on", [False, True]),
        feature_window=dice.turn("window", [1024, 1024, 8]),
        keep_features=dice.turn("kept features", [0, 1 << 20, 40_000]),
        room=dice.turn("room", [NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS, 7]),
        kept=dice.turn("kept", [0, 5, 100]),
        draft_room=dice.turn("draft's room", [NUM_BLOCKS, NUM_BLOCKS, 30]),
        seed=dice.getrandbits(32),
    )


def _ask(dice: Dice, vocab_size: int, max_depth: int) -> Asked:
    return Asked(
        prefix=dice.randrange(len(PREFIX_LENGTHS)),
        suffix=tuple(dice.randrange(vocab_size) for _ in range(dice.randint(0, 8))),
        sampling=_draw_sampling(dice, vocab_size),
        max_tokens=dice.choice([24, 16, 20, 28, 12, 32, 2, 1]),
        to_block_end=dice.random() < 0.5,
        mode=dice.choice([Mode.SSD, Mode.SSD, Mode.SSD, Mode.SSD, Mode.SYNC, Mode.OFF]),
        depth=dice.choice([1, 3, 5, max_depth, max_depth, max_depth]),
        num_logprobs=dice.choice([None, None, None, 0, 3]),
        stop=dice.choice(["", "", "", "", "", "", "token", "string"]),
        stop_at=dice.uniform(0.3, 0.95),
        resume=dice.choice([0.0, 0.0, 0.0, 0.0, 0.4, 0.8]),
    )


def _draw_sampling(dice: Dice, vocab_size: int) -> SamplingParams:
    plain = dice.random() < 0.3
    return SamplingParams(
        seed=dice.getrandbits(64),
        temperature=dice.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]),
        top_k=dice.choice([0, 0, 0, 0, 1, 5, 40]),
        top_p=dice.choice([1.0, 1.0, 1.0, 0.95, 0.5]),
        min_p=dice.choice([0.0, 0.0, 0.0, 0.05, 0.3]),
        repetition_penalty=1.0 if plain else dice.choice([1.0, 1.0, 1.1, 1.5, 0.8]),
        presence_penalty=0.0 if plain else dice.choice([0.0, 0.0, 0.5, -0.7]),
        frequency_penalty=0.0 if plain else dice.choice([0.0, 0.0, 0.4, -0.5]),
        logit_bias=dice.choice([(), *_draw_biases(dice, vocab_size)]),
    )


def _draw_biases(dice: Dice, vocab_size: int) -> Iterator[tuple[tuple[int, float], ...]]:
    tokens = dice.sample(range(vocab_size), 3)
    yield tuple((token, dice.choice([-100.0, -2.0, 1.0, 3.0])) for token in tokens)
    # Hardly more than three tokens are left: a text in which a look-up finds something.
    yield tuple((token, 30.0) for token in tokens)


def _draw_faults(dice: Dice) -> Faults:
    def chance(most: float) -> float:
        return dice.choice([0.0, most])

    return Faults(
        drop_link=chance(0.05),
        crash=chance(0.05),
        freeze=chance(0.05),
        duplicate=chance(0.3),
        hostile=chance(0.3),
        lost=chance(0.05),
        short=chance(0.5),
    )


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less in them."""
    if len(scenario.requests) > 1:
        for i in range(len(scenario.requests)):
            rest = (*scenario.requests[:i], *scenario.requests[i + 1 :])
            yield replace(scenario, requests=rest)
    for name, probability in asdict(scenario.faults).items():
        if probability:
            yield replace(scenario, faults=replace(scenario.faults, **{name: 0.0}))
    if len(scenario.drafts) > 1:
        yield replace(scenario, drafts=scenario.drafts[:1])
    if scenario.goes_on:
        yield replace(scenario, goes_on=False)
    for name in ("room", "draft_room"):
        if getattr(scenario, name) < NUM_BLOCKS:
            yield replace(scenario, **{name: NUM_BLOCKS})


# What came of them


@dataclass
class Met:
    """Over all scenarios."""

    sequences: int = 0
    tokens: int = 0
    excused: list[float] = field(default_factory=list)  # gaps
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    truncated: int = 0  # rounds with as much of a late branch as was there
    set_aside: int = 0
    swapped_out: int = 0
    befallen: Counter[str] = field(default_factory=Counter)  # what else befell them

    def add(self, other: "Met") -> None:
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.excused += other.excused
        self.stats.add(other.stats)
        self.truncated += other.truncated
        self.set_aside += other.set_aside
        self.swapped_out += other.swapped_out
        self.befallen += other.befallen


def check(pair: Pair, scenario: Scenario, met: Met) -> None:
    """Raise AssertionError where a token, or a logprob, is not plain decoding's."""
    plain = PlainTexts(pair)
    todo = [_request(pair, asked, plain) for asked in scenario.requests]
    waves = [todo]
    simulation = _simulation(pair, scenario)
    _count_truncated(simulation, met)
    with _cached_at_heads() as cached:
        results = [_run(simulation, todo, scenario.stagger)]
    _count_at_heads(todo, results[0], cached, scenario, met)
    if scenario.goes_on:
        waves.append(_second_wave(todo, results[0]))
        with _cached_at_heads() as cached:
            results.append(_run(simulation, waves[1], scenario.stagger))
        _count_at_heads(waves[1], results[1], cached, scenario, met)
    _check_nothing_is_left(simulation)
    for wave, outcome in zip(waves, results, strict=True):
        for request, result in zip(wave, outcome, strict=True):
            _compare(pair, request, result, plain.of(request), met)
    met.stats.add(simulation.speculator.totals)
    met.set_aside += simulation.core.stats().set_aside
    met.swapped_out += simulation.core.stats().swapped_out
    met.befallen += simulation.befallen
    met.befallen.update(asdict(simulation.speculator.feed.counters))


@contextmanager
def _cached_at_heads() -> Iterator[dict[int, int]]:
    """The most rows that heads had in their prefix caches of each sequence that they opened."""
    opened: dict[int, int] = {}

    def count(self: HeadSpeculator, sequence: DraftSequence, scope: int) -> None:
        real(self, sequence, scope)
        known = sequence.state.path.num_known
        opened[sequence.id] = max(known, opened.get(sequence.id, 0))

    real = HeadSpeculator.open
    with patch.object(HeadSpeculator, "open", count):
        yield opened


def _count_at_heads(
    asked: Sequence[Request],
    results: Sequence[Result],
    cached: dict[int, int],
    scenario: Scenario,
    met: Met,
) -> None:
    """Of the sequences that a head has opened: how they began."""
    for key, rows in cached.items():
        request, spared = asked[key], results[key].cached_tokens
        to_read = len(request.prompt) + len(request.generated) - spared
        met.befallen["at heads"] += 1
        met.befallen["resumed"] += bool(request.generated)
        met.befallen["in pieces"] += to_read > scenario.prefill_chunk
        met.befallen["prefix hits"] += spared > 0
        met.befallen["prefix hits at the head"] += rows > 0
        met.befallen["prefix hits on both sides"] += rows > 0 and spared > 0


class PlainTexts:
    """Of an engine that knows nothing of speculation and has nothing else to do."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._known: dict[str, Result] = {}

    def of(self, request: Request) -> Result:
        alone = replace(request, speculation=SpeculationRequest(), generated=[])
        name = repr(alone)
        if name not in self._known:
            core = make_core(self._pair.target, self._pair.token_bytes)
            self._known[name] = run(core, [alone])[0]
        return self._known[name]


def _prompt(pair: Pair, asked: Asked) -> list[int]:
    length = PREFIX_LENGTHS[asked.prefix]
    prefix = [(300 + 37 * (i % 5) + 11 * asked.prefix) % pair.vocab_size for i in range(length)]
    return [*prefix, *asked.suffix]


def _request(pair: Pair, asked: Asked, plain: PlainTexts) -> Request:
    prompt, max_tokens = _prompt(pair, asked), asked.max_tokens
    if asked.to_block_end:
        max_tokens += -(len(prompt) + max_tokens) % BLOCK
    request = Request(
        prompt,
        asked.sampling,
        max_tokens,
        num_logprobs=asked.num_logprobs,
        speculation=SpeculationRequest(asked.mode, depth=asked.depth),
    )
    if asked.stop:
        request = _stopped(pair, asked, request, plain.of(request).tokens)
    if asked.resume:
        text = plain.of(request).tokens
        request.generated = text[: int(asked.resume * len(text))]
    return request


def _stopped(pair: Pair, asked: Asked, request: Request, text: list[int]) -> Request:
    """The same, and its text meets a stop half way; at the end of a block where that can be."""
    new = [i for i, token in enumerate(text) if token not in text[:i]]
    at_block_end = [i for i in new if (len(request.prompt) + i + 1) % BLOCK == 0]
    if asked.stop == "token":
        chosen = at_block_end or new
        token = text[chosen[int(asked.stop_at * len(chosen))]]
        return replace(request, stop_ids=frozenset({token}))
    if asked.stop == "string":
        spelled = b"".join(pair.token_bytes[token] for token in text)
        begin = int(asked.stop_at * len(spelled))
        piece = spelled[begin : begin + 5].decode(errors="ignore")
        return replace(request, strings=(piece,)) if piece else request
    return request


def _second_wave(first: Sequence[Request], results: Sequence[Result]) -> list[Request]:
    """Conversations that go on: their prompts were generated, and are still in the cache."""
    return [
        replace(
            request,
            prompt=request.prompt + request.generated + result.tokens + [1],
            generated=[],
            stop_ids=frozenset(),
            strings=(),
            max_tokens=6,
            num_logprobs=1,  # they tell of a wrong cache sooner than tokens do
            sampling=replace(request.sampling, seed=request.sampling.seed ^ 1),
        )
        for request, result in zip(first, results, strict=True)
    ]


def _simulation(pair: Pair, scenario: Scenario) -> Simulation:
    options = SpeculationOptions(
        depth=scenario.depth,
        adapt_depth=scenario.adapt_depth,
        backup=scenario.backup,
        wait_seconds=scenario.wait_seconds,
        auto_off=False,
    )
    return Simulation(
        FewBlocks(pair.target, scenario.room),  # type: ignore[arg-type]
        [
            FewBlocks(pair.drafts[i], scenario.draft_room) if model else None  # type: ignore[misc]
            for i, model in enumerate(scenario.drafts)
        ],
        options,
        seed=scenario.seed,
        draft_steps=scenario.draft_steps,
        faults=replace(scenario.faults),
        sync=pair.drafts[-1],
        fan_out=scenario.fan_out,
        budget=scenario.budget if scenario.fan_out is None else 3 * DRAFT_DEPTH,
        token_bytes=pair.token_bytes,
        kept=KeptOptions(scenario.kept, 0.0) if scenario.kept else None,
        feature_window=scenario.feature_window,
        keep_features=scenario.keep_features,
        prefill_chunk=scenario.prefill_chunk,
    )


def _count_truncated(simulation: Simulation, met: Met) -> None:
    speculator, launch = simulation.speculator, simulation.speculator.launch

    def count(rows: Sequence[RowSpeculation]) -> None:
        cached = [row for row in rows if row.source is Source.CACHE]
        met.truncated += sum(len(row.speculation) < row.wanted for row in cached)
        launch(rows)

    speculator.launch = count  # type: ignore[method-assign]


def _run(simulation: Simulation, todo: list[Request], stagger: int) -> list[Result]:
    # Measured time would decide how long is waited: no two runs would be alike.
    clock = SimpleNamespace(monotonic=lambda: simulation.now)
    with patch("ssd_engine.forward.result.time", clock):
        return run(simulation.core, todo, stagger)


def _check_nothing_is_left(simulation: Simulation) -> None:
    simulation.faults = Faults()
    simulation.core.step()
    for draft in simulation.drafts:
        draft.frozen = 0
        while draft.to_draft or draft.core.has_work:
            simulation._step(draft)
        assert not any(link.sequences for link in draft.core._links.values())
        if isinstance(draft.core._speculator, ModelSpeculator):
            assert _is_empty(draft.core._speculator.pool)
    core, speculator = simulation.core, simulation.speculator
    core.check_integrity()
    assert not core.has_work
    assert not speculator._sequences
    assert not any(endpoint.sequences for endpoint in speculator.endpoints)
    assert _is_empty(core.scheduler.pool)
    assert not speculator.feed._fed
    assert speculator._sync is not None
    drafter: Any = speculator._sync.drafter
    assert not (drafter._texts if isinstance(drafter, HeadDrafter) else drafter._paths)
    assert _is_empty(drafter._pool)


def _is_empty(pool: Any) -> bool:
    return pool.num_leases == pool.num_used == pool.num_reserved == 0


def _compare(pair: Pair, request: Request, result: Result, expected: Result, met: Met) -> None:
    skipped = len(request.generated)
    assert result.finished
    met.sequences += 1
    met.tokens += len(result.tokens)
    tokens, logprobs = expected.tokens[skipped:], expected.logprobs[skipped:]
    if result.tokens != tokens:
        pairs = zip(result.tokens, tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        assert same is not None, f"{len(result.tokens)} tokens, {len(tokens)} in plain decoding"
        gap = gap_after(pair, request, expected.tokens[: skipped + same])
        assert gap < NEAR_TIE, f"token {same} of {len(tokens)} differs, at a gap of {gap:.1e}"
        met.excused.append(gap)
        logprobs = logprobs[:same]
    for ours, theirs in zip(result.logprobs, logprobs, strict=False):
        _compare_logprobs(ours, theirs)
    assert len(result.logprobs) == (0 if request.num_logprobs is None else len(result.tokens))


def _compare_logprobs(ours: Logprobs, theirs: Logprobs) -> None:
    assert abs(ours.chosen - theirs.chosen) < LOGPROB_TOLERANCE, (ours, theirs)
    assert len(ours.top) == len(theirs.top)
    for (token, value), (other, same) in zip(ours.top, theirs.top, strict=True):
        assert abs(value - same) < LOGPROB_TOLERANCE, (ours, theirs)
        # Of two that are equally likely either may come first, and either be the last of the list.
        near = [each for _, each in theirs.top if abs(each - same) < LOGPROB_TOLERANCE]
        assert token == other or len(near) > 1 or same == theirs.top[-1][1], (ours, theirs)


def gap_after(pair: Pair, request: Request, output: list[int]) -> float:
    """How far apart the two best tokens are at this place."""
    text = request.prompt + output
    logits = pair.target.forward([Chunk(text, 0, list(range(NUM_BLOCKS)), 1)])
    assert logits is not None
    scores = perturbed_scores(logits, [SampleRow(request.sampling, request.prompt, output)])
    best = torch.topk(scores[0], 2).values
    return float(best[0] - best[1])
