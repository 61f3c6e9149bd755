"""Rejection verification keeps the target's distribution over the whole path.

Real engines on both sides and a plane between them; small random models, so that the exact
probability of every text is known from transformers on the same weights. Hits, late branches, both
kinds of miss, branches that were waited for, n-gram guesses and missing distributions meet in the
same batches. What breaks a rule of rejection must fail the fits that the rules pass. Seeds are
fixed: a result never changes.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ssd_draft.planning.sequence import PreparedBranch
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from ssd_engine.speculation.frames import Verification
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.records.speculation_stats import SpeculationStats
from tests.fits import Floats, Ints, texts_fit
from tests.harness import GREEDY, Request, make_core, make_runner, run
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


@dataclass(frozen=True)
class Pair:
    target: ModelRunner
    draft: ModelRunner
    oracle: LlamaForCausalLM  # the target, to transformers

    @torch.no_grad()
    def logits(self, histories: Sequence[list[int]]) -> Tensor:
        """[histories, VOCAB]: what the target says after each."""
        texts = torch.tensor([[*PROMPT, *history] for history in histories])
        logits: Tensor = self.oracle(texts).logits[:, -1]
        return logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that is nearly its target."""
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
    return Pair(make_runner(folder / "target"), make_runner(folder / "near", 1024), oracle)


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


def simulation(pair: Pair, seed: int, trusted: bool = True) -> Simulation:
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
        draft_steps=(0, 8),
        faults=Faults(lose_rows=0.15),
        sync=True,
        fan_out=FAN_OUT,
        budget=16,
        max_num_seqs=WAVE,
        trusted=trusted,
    )


def generate(sim: Simulation, requests: Sequence[Request]) -> list[list[int]]:
    """Texts, wave after wave."""
    waves = [[*requests[begin : begin + WAVE]] for begin in range(0, len(requests), WAVE)]
    return [result.tokens for wave in waves for result in sim.run(wave)]


def as_numbers(texts: Sequence[Sequence[int]]) -> Ints:
    places = VOCAB ** np.arange(LENGTH)[::-1]
    return np.array([text[:LENGTH] for text in texts]) @ places


def check(pair: Pair, case: Case, n: int, seed: int) -> tuple[float, SpeculationStats]:
    sim = simulation(pair, seed)
    texts = generate(sim, [case.request(10**6 * seed + i) for i in range(n)])
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


# Each rule is tried once more in other company, and, without engines, in test_rejection.py.
CASES = {
    "C = 1": Case(),
    "C = 0.5": Case(0.5),
    "C = 0.1": Case(0.1),
    "filters, C = 0.5": Case(0.5, "filters"),
    "penalties, C = 0.1": Case(0.1, "penalties"),
    "sync, C = 1": Case(mode=Mode.SYNC),
    "sync, C = 0.5, filters": Case(0.5, "filters", Mode.SYNC),
}
TEXTS = 6400


# Each rule is tried once more in other company, and, without engines, in test_rejection.py.


@pytest.mark.parametrize("name", [name if "filters" in name else full_only(name) for name in CASES])
def test_texts_follow_the_targets_distribution(name: str, pair: Pair) -> None:
    case = CASES[name]
    p_value, totals = check(pair, case, share(case.texts), seed=list(CASES).index(name))
    assert p_value > PASSES
    if case.mode is Mode.SSD:
        seen = met(totals)
        assert min(seen.values()) >= 5, seen
    else:
        assert min(totals.sync_rounds, totals.rejected_rounds, totals.full_rounds) >= 50
        assert totals.rejection_rounds == totals.sync_rounds


# Without engines the rules themselves are broken, in test_rejection.py.


def first_branch_is_reported(self: ModelSequence, branch: PreparedBranch) -> None:
    """Of all branches of the tree, whichever was taken."""
    drafted = self.drafting is not None
    self.distributions = [each[:1] for each in self.distributions] if drafted else []
    self._decided_slots = []


@pytest.mark.full
def test_a_mutant_is_rejected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSequence, "keep_branch", first_branch_is_reported)
    p_value, _ = check(pair, Case(), TEXTS // 10, seed=106)
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


@pytest.mark.parametrize("trusted", [True, False])
def test_greedy_texts_are_those_of_plain_decoding(pair: Pair, trusted: bool) -> None:
    """Without trust all are: rejection gives way to coupled verification."""
    requests = greedy_requests()
    sim = simulation(pair, seed=200, trusted=trusted)
    texts = generate(sim, requests)
    plain = run(make_core(pair.target), [replace(r, speculation=OFF) for r in requests])
    for text, request, expected in zip(texts, requests, plain, strict=True):
        assert text == expected.tokens or (trusted and not request.sampling.greedy)
    totals = sim.speculator.totals
    assert min(met(totals).values() if trusted else [totals.hits, totals.full_rounds]) >= 5
    assert (totals.fallbacks.get("coupled: the endpoint is not trusted", 0) > 50) is not trusted
