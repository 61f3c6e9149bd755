"""Scenarios of speculation: requests, drafts and what goes wrong, held against plain decoding.

Every token that comes out of a scenario is compared with what an engine without speculation gives
for the same request and seed when it serves that request alone.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.kvcache.cache import KVCache
from ssd_engine.sampling.params import SamplingParams
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

    def __post_init__(self) -> None:
        self._plain: dict[str, Result] = {}

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size

    def plain(self, request: Request) -> Result:
        """Of an engine that knows nothing of speculation and has nothing else to do."""
        alone = replace(request, speculation=SpeculationRequest(), generated=[])
        name = repr(alone)
        if name not in self._plain:
            self._plain[name] = run(make_core(self.target, self.token_bytes), [alone])[0]
        return self._plain[name]


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
class Scenario:
    requests: tuple[Request, ...]
    options: SpeculationOptions
    drafts: tuple[bool, ...]  # of each: whether it has a model, or looks up
    stagger: int
    goes_on: bool  # texts are prompts of a second wave
    room: int  # KV blocks of the target
    draft_room: int
    kept: int  # KV blocks of those that are set aside, in the host's memory
    how: dict[str, Any]  # all else that a simulation is told


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


def draw_scenario(pair: Pair, number: int) -> Scenario:
    dice = Dice(pair.name, number)
    steps, backup, least = dice.turn("speed", SPEEDS)
    depth = max(least, dice.randint(1, 8))
    fan_out = dice.turn("fan-out", FAN_OUTS)
    return Scenario(
        requests=tuple(_ask(dice, pair, depth) for _ in range(dice.turn("size", SIZES))),
        options=SpeculationOptions(
            depth=depth,
            adapt_depth=dice.choice([False, False, True]),
            backup=dice.choice([backup, backup, backup, *Backup]),
            wait_seconds=dice.turn("wait", [None, 0.02, 0.02, 0.002, 0.0]),
            auto_off=False,
        ),
        drafts=dice.turn("drafts", DRAFTS),
        stagger=dice.choice([0, 0, 1, 3]),
        goes_on=dice.turn("goes on", [False, True]),
        room=dice.turn("room", [NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS, 7]),
        kept=dice.turn("kept", [0, 5, 100]),
        draft_room=dice.turn("draft's room", [NUM_BLOCKS, NUM_BLOCKS, 30]),
        how={
            "fan_out": fan_out,
            "budget": dice.choice([16, 6, 1]) if fan_out is None else 3 * DRAFT_DEPTH,
            "draft_steps": steps,
            "faults": dice.choice([Faults(), _draw_faults(dice)]),
            "feature_window": dice.turn("window", [1024, 1024, 8]),
            "keep_features": dice.turn("kept features", [0, 1 << 20, 40_000]),
            "prefill_chunk": 128,
            "seed": dice.getrandbits(32),
        },
    )


def _ask(dice: Dice, pair: Pair, max_depth: int) -> Request:
    length, vocab = dice.choice(PREFIX_LENGTHS), range(pair.vocab_size)
    prompt = [vocab[(300 + 37 * (i % 5) + 11 * length) % len(vocab)] for i in range(length)]
    prompt += dice.choices(vocab, k=dice.randint(0, 8))
    max_tokens = dice.choice([24, 16, 20, 28, 12, 32, 2, 1])
    if dice.random() < 0.5:  # the text ends with a block
        max_tokens += -(len(prompt) + max_tokens) % BLOCK
    mode = dice.choice([Mode.SSD, Mode.SSD, Mode.SSD, Mode.SSD, Mode.SYNC, Mode.OFF])
    depth = dice.choice([1, 3, 5, max_depth, max_depth, max_depth])
    request = Request(
        prompt,
        _draw_sampling(dice, pair.vocab_size),
        max_tokens,
        num_logprobs=dice.choice([None, None, None, 0, 3]),
        speculation=SpeculationRequest(mode, depth=depth),
    )
    if stop := dice.choice(["", "", "", "", "", "", "token", "string"]):
        request = _stopped(pair, request, stop, dice.uniform(0.3, 0.95))
    if share := dice.choice([0.0, 0.0, 0.0, 0.0, 0.4, 0.8]):
        text = pair.plain(request).tokens
        request.generated = text[: int(share * len(text))]
    return request


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


# What came of them


@dataclass
class Met:
    """Over all scenarios."""

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    befallen: Counter[str] = field(default_factory=Counter)  # what else befell them

    def add(self, other: "Met") -> None:
        self.stats.add(other.stats)
        self.befallen += other.befallen


def run_scenarios(pair: Pair, scenarios: Iterable[Scenario]) -> Met:
    met = Met()
    for number, scenario in enumerate(scenarios):
        try:
            check(pair, scenario, met)
        except Exception as error:
            raise AssertionError(f"{pair.name}, scenario {number}: {scenario}") from error
    return met


def check(pair: Pair, scenario: Scenario, met: Met) -> None:
    """Raise AssertionError where a token, or a logprob, is not plain decoding's."""
    simulation = _simulation(pair, scenario)
    _count_truncated(simulation, met)
    todo, ended = [*scenario.requests], []
    for _ in range(1 + scenario.goes_on):
        results = simulation.run(todo, scenario.stagger)
        ended += zip(todo, results, strict=True)
        todo = _second_wave(todo, results)
    _check_nothing_is_left(simulation)
    for request, result in ended:
        _compare(scenario, request, result, pair.plain(request), met)
    stats = simulation.core.stats()
    met.stats.add(simulation.speculator.totals)
    met.befallen.update(set_aside=stats.set_aside, swapped_out=stats.swapped_out)
    met.befallen += simulation.befallen
    met.befallen.update(asdict(simulation.speculator.feed.counters))


def _stopped(pair: Pair, request: Request, stop: str, stop_at: float) -> Request:
    """The same, and its text meets a stop there; at the end of a block where that can be."""
    text = pair.plain(request).tokens
    if stop == "token":
        new = [i for i, token in enumerate(text) if token not in text[:i]]
        at_block_end = [i for i in new if (len(request.prompt) + i + 1) % BLOCK == 0]
        chosen = at_block_end or new
        token = text[chosen[int(stop_at * len(chosen))]]
        return replace(request, stop_ids=frozenset({token}))
    spelled = b"".join(pair.token_bytes[token] for token in text)
    begin = int(stop_at * len(spelled))
    piece = spelled[begin : begin + 5].decode(errors="ignore")
    return replace(request, strings=(piece,)) if piece else request


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
    return Simulation(
        FewBlocks(pair.target, scenario.room),  # type: ignore[arg-type]
        [
            FewBlocks(pair.drafts[i], scenario.draft_room) if model else None  # type: ignore[misc]
            for i, model in enumerate(scenario.drafts)
        ],
        scenario.options,
        sync=pair.drafts[-1],
        token_bytes=pair.token_bytes,
        kept=KeptOptions(scenario.kept, 0.0) if scenario.kept else None,
        **{**scenario.how, "faults": replace(scenario.how["faults"])},
    )


def _count_truncated(simulation: Simulation, met: Met) -> None:
    speculator, launch = simulation.speculator, simulation.speculator.launch

    def count(rows: Sequence[RowSpeculation]) -> None:
        cached = [row for row in rows if row.source is Source.CACHE]
        met.befallen["truncated"] += sum(len(row.speculation) < row.wanted for row in cached)
        launch(rows)

    speculator.launch = count  # type: ignore[method-assign]


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


def _compare(
    scenario: Scenario, request: Request, result: Result, expected: Result, met: Met
) -> None:
    skipped = len(request.generated)
    assert result.finished
    assert result.tokens == expected.tokens[skipped:]
    assert result.logprobs == expected.logprobs[skipped:]  # every bit
    told = len(request.prompt) + skipped - result.cached_tokens
    met.befallen.update(
        {
            "sequences": 1,
            "tokens": len(result.tokens),
            "resumed": bool(skipped),
            "in pieces": told > scenario.how["prefill_chunk"],
            "prefix hits": result.cached_tokens > 0,
        }
    )
