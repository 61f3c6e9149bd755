"""Rejection verification keeps the target's distribution over the whole path.

Real engines on both sides and a plane between them; small random models, so that the exact
probability of every text is known from transformers on the same weights. Hits, late branches, both
kinds of miss, branches that were waited for, n-gram guesses and missing distributions meet in the
same batches. What breaks a rule of rejection must fail the fits that the rules pass. Seeds are
fixed: a result never changes.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ssd_draft.planning.sequence import PreparedBranch
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Draw, Part
from ssd_engine.forward.result import ImmediateForward, Score
from ssd_engine.sampling.guesses import drawn_guesses
from ssd_engine.sampling.noise import STREAM_DRAFT, signed64
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import (
    SampledSpeculation,
    draft_distribution,
    draw_from,
    saguaro,
    to_wire,
    verify_rejection,
)
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from ssd_engine.speculation.frames import Verification
from ssd_engine.speculation.speculation import Speculation
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from tests.fits import Floats, Ints, texts_fit
from tests.harness import GREEDY, Request, make_core, make_runner, run, submit
from tests.random_models import SMALL
from tests.simulation import Faults, Simulation
from tests.suite.scale import FULL, full_only, share

PASSES = 1e-4  # the p-values of the rules as they are lie above
REJECTED = 1e-6  # those of mutants below

VOCAB, DEPTH = 12, 3
NUM_TOKENS, LENGTH = 5, 4  # that are generated, and of these the first, which are fitted
OFF = SpeculationRequest()
FAN_OUT = (4, 0, 1, 2)  # none of the outcomes after one accepted token
WAVE = 32  # sequences that run at a time
PROMPT = torch.randint(0, VOCAB, (33,), generator=torch.Generator().manual_seed(3)).tolist()


# Small targets and small drafts


class Leaning:
    """A model, less sure of itself, that prefers some tokens whatever the text."""

    chains = False
    features = None

    def __init__(self, runner: ModelRunner, *preferred: tuple[int, float]) -> None:
        self._runner = runner
        self.config, self.num_blocks = runner.config, runner.num_blocks
        self.bias = torch.zeros(VOCAB)
        for token, value in preferred:
            self.bias[token] = value

    def lean(self, logits: Tensor) -> Tensor:
        return 0.3 * logits + self.bias

    def forward(self, parts: Sequence[Part], score: Score | None = None) -> Tensor | None:
        logits = self._runner.forward(parts)
        return None if logits is None else self.lean(logits)

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> ImmediateForward:
        return ImmediateForward(lambda: self.forward(parts))


@dataclass(frozen=True)
class Pair:
    target: ModelRunner | Leaning
    draft: ModelRunner | Leaning
    oracle: LlamaForCausalLM  # the target, to transformers

    @torch.no_grad()
    def logits(self, histories: Sequence[list[int]]) -> Tensor:
        """[histories, VOCAB]: what the target says after each."""
        texts = torch.tensor([[*PROMPT, *history] for history in histories])
        logits: Tensor = self.oracle(texts).logits[:, -1]
        return self.target.lean(logits) if isinstance(self.target, Leaning) else logits


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    torch.manual_seed(5)
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.35)
    oracle = LlamaForCausalLM(LlamaConfig(**{**SMALL, **shape, **heads})).float().eval()
    near = deepcopy(oracle)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += 0.045 * torch.randn_like(parameter)
    folder: Path = tmp_path_factory.mktemp("models")
    oracle.save_pretrained(folder / "target")
    near.save_pretrained(folder / "near")
    target, same = make_runner(folder / "target"), make_runner(folder / "target", 1024)
    return {
        "near": Pair(target, make_runner(folder / "near", 1024), oracle),
        "same": Pair(target, same, oracle),
        # The draft often draws 2, which is then rejected: for 0, which it might have drawn as well,
        # or for 1, which it hardly ever draws.
        "rivals": Pair(
            Leaning(target, (0, 6.0), (1, 5.0)),
            Leaning(same, (0, 6.0), (1, 2.0), (2, 6.0)),
            oracle,
        ),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "filters": dict(temperature=1.2, top_k=7, top_p=0.9),
    "penalties": dict(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.6
    ),
}


@dataclass(frozen=True)
class Case:
    down_weight: float = 1.0
    options: str = "none"
    mode: Mode = Mode.SSD
    models: str = "near"
    calm: bool = False  # nothing is ever late or missing
    times: int = 1  # as many texts, to be sure
    patches: dict[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> int:
        return TEXTS if self.options == "none" else TEXTS // 2  # options take their time

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(seed, **OPTIONS[self.options])

    def request(self, seed: int) -> Request:
        speculation = SpeculationRequest(
            self.mode, Verification.REJECTION, DEPTH, None, self.down_weight
        )
        return Request(PROMPT, self.sampling(seed), NUM_TOKENS, speculation=speculation)

    def exact(self, pair: Pair) -> Floats:
        """The probability of every text of LENGTH tokens."""
        reach = np.ones(1)
        for length in range(LENGTH):
            histories = [list(h) for h in product(range(VOCAB), repeat=length)]
            rows = [SampleRow(self.sampling(0), PROMPT, history) for history in histories]
            p = target_distribution(pair.logits(histories), rows)
            reach = (reach[:, None] * p.numpy()).ravel()
        return reach


# Generation


def simulation(pair: Pair, seed: int, calm: bool = False, trusted: bool = True) -> Simulation:
    """From no step of the draft in a forward, when nothing arrives, to enough for everything."""
    return Simulation(
        pair.target,  # type: ignore[arg-type]
        pair.draft,  # type: ignore[arg-type]
        SpeculationOptions(
            DEPTH,
            adapt_depth=False,
            backup=Backup.AUTO,
            wait_seconds=0.003,
            auto_off=False,
        ),
        seed,
        draft_steps=(9, 9) if calm else (0, 8),
        faults=Faults(lose_rows=0.0 if calm else 0.15),
        sync=True,
        fan_out=(4,) if calm else FAN_OUT,
        budget=16,
        max_num_seqs=WAVE,
        trusted=trusted,
    )


def generate(
    sim: Simulation, requests: Sequence[Request], patches: dict[str, Any] | None = None
) -> list[list[int]]:
    """Texts, wave after wave."""
    texts: list[list[int]] = [[] for _ in requests]
    with ExitStack() as stack:
        clock = SimpleNamespace(monotonic=lambda: sim.now)
        everything = {"ssd_engine.forward.result.time": clock, **(patches or {})}
        for name, value in everything.items():
            stack.enter_context(patch(name, value))
        for begin in range(0, len(requests), WAVE):
            for i in range(begin, min(begin + WAVE, len(requests))):
                sim.core.handle(submit(i, requests[i]))
            while sim.core.has_work:
                for delta in sim.core.step().deltas:
                    texts[delta.sequence] += delta.tokens
                sim.core.check_integrity()
    return texts


def as_numbers(texts: Sequence[Sequence[int]]) -> Ints:
    places = VOCAB ** np.arange(LENGTH)[::-1]
    return np.array([text[:LENGTH] for text in texts]) @ places


def check(pairs: dict[str, Pair], case: Case, n: int, seed: int) -> tuple[float, SpeculationStats]:
    pair = pairs[case.models]
    sim = simulation(pair, seed, case.calm)
    texts = generate(sim, [case.request(10**6 * seed + i) for i in range(n)], case.patches)
    p_value = texts_fit(as_numbers(texts), case.exact(pair), VOCAB, LENGTH)
    print(f"p = {p_value:.3g}; {sim.speculator.totals}")
    return p_value, sim.speculator.totals


def met(totals: SpeculationStats) -> dict[str, int]:
    """How often everything happened that has to be met."""
    return {
        "hit": totals.hits,
        "late": totals.late,
        "late, and taken": totals.cache_rounds - totals.hits,
        "miss of a length": totals.length_misses,
        "miss of a token": totals.token_misses,
        "just in time": totals.just_in_time_rounds,
        "n-gram": totals.ngram_rounds,
        "plain": totals.plain_rounds,
        "rejected": totals.rejected_rounds,
        "accepted in full": totals.full_rounds,
        "rows missing": totals.fallbacks.get("no distributions", 0),
        "rows there": totals.rejection_rounds
        - totals.ngram_rounds
        - totals.fallbacks.get("no distributions", 0),
    }


SHIPPED = "ssd_engine.sampling.guesses.draft_distribution"


def coarse(q: Tensor) -> Tensor:
    """What a number without a mantissa, and with few exponents, keeps: a power of 16."""
    return to_wire(16.0 ** (q.log2() / 4).round())


def coarse_distribution(
    logits: Tensor, rows: Sequence[SampleRow], fan_out: Sequence[int], down_weight: Sequence[float]
) -> Tensor:
    return coarse(saguaro(target_distribution(logits, rows), fan_out, down_weight))


CASES = {
    "C = 1": Case(),
    "C = 0.5": Case(0.5),
    "C = 0.1": Case(0.1),
    "filters, C = 0.5": Case(0.5, "filters"),
    "penalties, C = 0.1": Case(0.1, "penalties"),
    "coarse wire": Case(models="same", patches={SHIPPED: coarse_distribution}),
    "rivals": Case(models="rivals"),
    "sync, C = 1": Case(mode=Mode.SYNC),
    "sync, C = 0.5, filters": Case(0.5, "filters", Mode.SYNC),
}
TEXTS = 6400


# Each rule is tried once more in other company, and, without engines, in test_rejection.py.
MORE_CASES = {
    "C = 1",
    "C = 0.5",
    "C = 0.1",
    "penalties, C = 0.1",
    "coarse wire",
    "rivals",
    "sync, C = 1",
}


def with_more_in_full(names: Iterable[str], more: set[str]) -> list[Any]:
    return [full_only(name) if name in more else name for name in names]


@pytest.mark.parametrize("name", with_more_in_full(CASES, MORE_CASES))
def test_texts_follow_the_targets_distribution(name: str, pairs: dict[str, Pair]) -> None:
    case = CASES[name]
    p_value, totals = check(pairs, case, share(case.texts), seed=list(CASES).index(name))
    assert p_value > PASSES
    if case.mode is Mode.SSD:
        seen = met(totals)
        assert min(seen.values()) >= 5, seen
    else:
        assert min(totals.sync_rounds, totals.rejected_rounds, totals.full_rounds) >= 50
        assert totals.rejection_rounds == totals.sync_rounds


# Mutants


def q_is_reported(
    logits: Tensor, rows: Sequence[SampleRow], fan_out: Sequence[int], down_weight: Sequence[float]
) -> tuple[list[int], Tensor]:
    tokens, _ = drawn_guesses(logits, rows, fan_out, down_weight)
    return tokens, draft_distribution(logits, rows, fan_out, [1.0] * len(rows))


def rounded_after_drawing(
    logits: Tensor, rows: Sequence[SampleRow], fan_out: Sequence[int], down_weight: Sequence[float]
) -> tuple[list[int], Tensor]:
    sigma = saguaro(target_distribution(logits, rows), fan_out, down_weight)
    seeds = torch.tensor([signed64(row.params.seed) for row in rows])
    positions = torch.tensor([row.position for row in rows])
    tokens = draw_from(sigma, seeds, positions, STREAM_DRAFT).tolist()
    return tokens, coarse(sigma)


def kept_by_value(fill: Callable[..., None]) -> Callable[..., None]:
    """The target drops a token, and what follows, for what it is."""

    def wrapper(row: RowSpeculation, source: Any) -> None:
        fill(row, source)
        tokens = row.speculation.tokens
        wrong = next((i for i, token in enumerate(tokens) if token % 2 == 0), None)
        row.speculation = Speculation(tokens[:wrong])

    return wrapper


def missing_is_accepted(
    p: Tensor, speculations: Sequence[SampledSpeculation]
) -> list[tuple[int, int]]:
    filled, begin = [], 0
    for s in speculations:
        own = p[begin : begin + len(s.tokens)]
        filled.append(replace(s, wire=own) if s.known < len(s.tokens) else s)
        begin += len(s.tokens) + 1
    return verify_rejection(p, filled)


def first_branch_is_reported(self: ModelSequence, branch: PreparedBranch) -> None:
    """Of all branches of the tree, whichever was taken."""
    drafted = self.drafting is not None
    self.distributions = [each[:1] for each in self.distributions] if drafted else []
    self._decided_slots = []


DRAWN = "ssd_draft.speculators.model.results.drawn_guesses"
FILL = "ssd_target.speculation.endpoints.sequence_speculation.RowSpeculation.fill"
KEEP = "ssd_draft.speculators.model.sequence.ModelSequence.keep_branch"
RESIDUAL = "ssd_engine.sampling.rejection.STREAM_RESIDUAL"
VERIFY = "ssd_target.scheduling.verifier.verify_rejection"
MUTANTS = {
    "q for sigma": Case(0.1, patches={DRAWN: q_is_reported}),
    "tokens kept by value": Case(
        models="same", calm=True, patches={FILL: kept_by_value(RowSpeculation.fill)}
    ),
    "draft and residual in a stream": Case(
        models="rivals", calm=True, patches={RESIDUAL: STREAM_DRAFT}
    ),
    "sync, draft and residual in a stream": Case(
        mode=Mode.SYNC, models="rivals", patches={RESIDUAL: STREAM_DRAFT}
    ),
    "rounded after drawing": Case(
        models="same", calm=True, times=2, patches={DRAWN: rounded_after_drawing}
    ),
    "missing rows accepted": Case(models="rivals", patches={VERIFY: missing_is_accepted}),
    "another branch's rows": Case(patches={KEEP: first_branch_is_reported}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, pairs: dict[str, Pair]) -> None:
    case, seed = MUTANTS[name], 100 + list(MUTANTS).index(name)
    p_value, _ = check(pairs, case, case.times * TEXTS // 10, seed)
    assert p_value < REJECTED


# At temperature 0 the text itself is the target's


def greedy_requests() -> list[Request]:
    """Every other one draws, in the same batch."""
    plain, penalised = GREEDY, replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3)
    requests = []
    for i in range((6 if FULL else 3) * WAVE):
        sampling = [plain, SamplingParams(i), penalised, SamplingParams(i, top_k=3)][i % 4]
        speculation = SpeculationRequest(
            Mode.SSD, Verification.REJECTION, DEPTH, None, [1.0, 0.5, 0.1, 0.0][i // 4 % 4]
        )
        prompt = PROMPT[: 17 + 2 * (i // WAVE)]  # a wave runs in step
        requests.append(Request(prompt, sampling, 8, speculation=speculation))
    return requests


def test_greedy_texts_are_those_of_plain_decoding(pairs: dict[str, Pair]) -> None:
    pair, requests = pairs["near"], greedy_requests()
    sim = simulation(pair, seed=200)
    texts = generate(sim, requests)
    plain = run(make_core(pair.target), [replace(r, speculation=OFF) for r in requests])  # type: ignore[arg-type]
    for text, request, expected in zip(texts, requests, plain, strict=True):
        if request.sampling.greedy:
            assert text == expected.tokens
    seen = met(sim.speculator.totals)
    print(seen)
    assert min(seen.values()) >= 5, seen


def test_without_trust_rejection_gives_way_to_coupled_verification(pairs: dict[str, Pair]) -> None:
    pair, requests = pairs["near"], greedy_requests()
    sim = simulation(pair, seed=201, trusted=False)
    texts = generate(sim, requests)
    plain = run(make_core(pair.target), [replace(r, speculation=OFF) for r in requests])  # type: ignore[arg-type]
    for i, (text, expected) in enumerate(zip(texts, plain, strict=True)):
        assert text == expected.tokens, i
    totals = sim.speculator.totals
    print(totals)
    assert totals.fallbacks["coupled: the endpoint is not trusted"] > 50
    assert min(totals.hits, totals.rejected_rounds, totals.full_rounds) > 50
