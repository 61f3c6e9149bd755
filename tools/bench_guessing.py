"""How well the shipped draft guesses: acceptance, hit rates, tokens per round; theorem 12.

    python -m tools.bench_guessing [--prompts 12] [--tokens 48] [--seeds 1] [--depth 4]

Target and draft run in one process and in turns, so the draft always has the time it needs: what
is measured is what it guesses, not how fast. A row that misses goes on without a speculation.
Intervals (95 %) are bootstrapped over texts. The second table holds the fan-out from rates that
are measured while running (theorem 12) against a uniform one of the same budget, text by text.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from ssd_draft.planning.plan import Planner, RoundPlan
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.fan_out import uniform
from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.speculation.latency_model import StepClock
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)
from ssd_target.speculation.ssd import EndpointSpeculation
from tests.harness import Request, Result, make_runner, run
from tests.simulation import DRAFT_ROWS, Simulation
from tools.bench_kit import setting, story_prompts

TARGET, DRAFT = "stories-target", "stories-draft"
TEMPERATURES = (0.0, 0.7, 1.0)
WIDTHS = (1, 3, 5)
BUDGETS = (10, 15)
BOOTSTRAPS = 4000
# Columns of what is counted for each text.
COLUMNS = ("rounds", "tokens", "judged", "accepted", "full", "full_hits", "cut", "cut_hits")
ROUNDS, TOKENS, JUDGED, ACCEPTED, FULL, FULL_HITS, CUT, CUT_HITS = range(len(COLUMNS))

Counts = NDArray[np.float64]  # [texts, columns]


@dataclass(frozen=True)
class Way:
    """How target and draft work together."""

    temperature: float
    verification: Verification = Verification.COUPLED
    down_weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # further sampling options

    @property
    def name(self) -> str:
        if self.verification is Verification.COUPLED:
            return "coupled"
        return f"rejection, C = {self.down_weight:g}"


class UniformPlanner(Planner):
    """The same budget whatever is being verified, the same for each of its outcomes."""

    def plan(self, sequence: DraftSequence, clock: StepClock, others: int) -> RoundPlan:
        depth = min(self.depth, sequence.depth)
        return RoundPlan(uniform(len(sequence.speculation), self._budget), depth)


@dataclass
class LookUps:
    """What is found under the outcomes of rounds that verified something, text by text."""

    full: dict[int, list[bool]] = field(default_factory=dict)
    cut: dict[int, list[bool]] = field(default_factory=dict)

    def watch(self, look_up: Callable[..., RowSpeculation]) -> Callable[..., RowSpeculation]:
        def watched(
            strategy: EndpointSpeculation, state: SequenceSpeculation, num_rows: int
        ) -> RowSpeculation:
            drafted = len(state.row.speculation) if state.row else 0
            decided = state.session.decided
            row = look_up(strategy, state, num_rows)
            if row.wanted and drafted and decided is not None:
                kind = self.full if decided[0] == drafted else self.cut
                hit = row.source is Source.CACHE
                kind.setdefault(state.sequence.id, []).append(hit)
            return row

        return watched


class Bench:
    def __init__(
        self,
        prompts: int,
        seeds: int,
        tokens: int,
        depth: int,
        draft: ModelRunner | None = None,
    ) -> None:
        """``draft``: None takes the shipped one, on the CPU."""
        torch.set_num_threads(1)
        directory = resolve_model(TARGET)
        self._depth, self._tokens = depth, tokens
        self._target = make_runner(directory, 2048, max_num_seqs=256)
        self._draft = draft or make_runner(resolve_model(DRAFT), 4096, max_num_seqs=256)
        tokenizer = Tokenizer(directory, self._target.config)
        self._ends = frozenset(self._target.config.eos_token_ids)
        texts = story_prompts(prompts, seed=0)
        chats = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        # A seed of its own for each text: with a shared one, texts are no independent samples.
        self._texts = [(chat, seed) for seed, chat in enumerate(chats * seeds)]
        self._prompts = prompts

    def measure(
        self,
        way: Way,
        budget: int,
        make_planner: Callable[[], Planner],
        seed: int | None = None,
    ) -> Counts:
        """``seed``: of all prompts, the texts of that one alone."""
        texts = self._texts if way.temperature else self._texts[: self._prompts]
        if seed is not None:
            texts = self._texts[seed * self._prompts : (seed + 1) * self._prompts]
        look_ups = LookUps()
        # A depth takes several forwards where its rows do not fit into one.
        forwards = 1 + len(texts) * (budget + self._depth + 1) // DRAFT_ROWS
        steps = (self._depth + 4) * forwards
        simulation = Simulation(
            self._target,
            self._draft,
            SpeculationOptions(
                depth=self._depth, adapt_depth=False, backup=Backup.NONE, auto_off=False
            ),
            draft_steps=(steps, steps),
            budget=budget,
            trusted=True,
            make_planner=make_planner,
        )
        with patch.object(
            EndpointSpeculation, "look_up", look_ups.watch(EndpointSpeculation.look_up)
        ):
            results = run(simulation.core, [self._request(way, *text) for text in texts])
        late = simulation.speculator.totals.late
        if late:
            raise SystemExit(f"{late} branches were late: the draft needs more steps")
        return np.array([self._count(i, result, look_ups) for i, result in enumerate(results)])

    def _request(self, way: Way, prompt: list[int], seed: int) -> Request:
        return Request(
            prompt,
            SamplingParams(seed, way.temperature, **way.options),
            self._tokens,
            self._ends,
            speculation=SpeculationRequest(
                Mode.SSD, way.verification, self._depth, None, way.down_weight
            ),
        )

    def _count(self, text: int, result: Result, look_ups: LookUps) -> list[int]:
        stats = result.speculation
        if stats is None:
            raise SystemExit("a text ended without statistics")
        full, cut = look_ups.full.get(text, []), look_ups.cut.get(text, [])
        judged = stats.accepted_tokens + stats.rejected_rounds
        tokens = len(result.tokens) - 1  # the first comes with the prompt
        counts = [stats.rounds, tokens, judged, stats.accepted_tokens]
        return [*counts, len(full), sum(full), len(cut), sum(cut)]


# Statistics

Statistic = Callable[[Counts], Counts]  # of sums over texts [.., columns]


def ratio(above: Sequence[int], below: Sequence[int]) -> Statistic:
    def statistic(sums: Counts) -> Counts:
        total = sums[..., list(below)].sum(axis=-1)
        share: Counts = sums[..., list(above)].sum(axis=-1) / np.maximum(total, 1)
        return share

    return statistic


ACCEPTANCE = ratio([ACCEPTED], [JUDGED])
AFTER_FULL = ratio([FULL_HITS], [FULL])
AFTER_CUT = ratio([CUT_HITS], [CUT])
HIT_RATE = ratio([FULL_HITS, CUT_HITS], [FULL, CUT])
PER_ROUND = ratio([TOKENS], [ROUNDS])


def resampled(counts: Counts) -> Counts:
    """Sums over as many texts, drawn again and again: [BOOTSTRAPS, columns]."""
    n = len(counts)
    times = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=BOOTSTRAPS)
    sums: Counts = times @ counts
    return sums


def interval(values: Counts) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def show(counts: Counts, statistic: Statistic, digits: int = 3) -> str:
    low, high = interval(statistic(resampled(counts)))
    middle = float(statistic(counts.sum(axis=0)))
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def difference(ours: Counts, theirs: Counts, statistic: Statistic) -> tuple[str, float]:
    """The difference of two ways over the same texts; also the upper end of its interval."""
    # The same generator draws the same texts of both.
    low, high = interval(statistic(resampled(ours)) - statistic(resampled(theirs)))
    middle = float(statistic(ours.sum(axis=0)) - statistic(theirs.sum(axis=0)))
    return f"{middle:+.3f} ({low:+.3f} – {high:+.3f})", high


# Tables


def ways(temperature: float) -> list[Way]:
    """At temperature 0 there is nothing to draw, and all are one."""
    rejection = [Way(temperature, Verification.REJECTION, c) for c in (1.0, 0.5)]
    return [Way(temperature), *(rejection if temperature else [])]


def guessing(bench: Bench, depth: int) -> None:
    print(
        f"\n{'T':>4}  {'verification':18} {'F':>2}  {'acceptance':20} "
        f"{'hit after all accepted':23} {'hit after a rejection':22} tokens per round"
    )
    for temperature in TEMPERATURES:
        for way in ways(temperature):
            for width in WIDTHS:
                budget = width * (depth + 1)
                counts = bench.measure(way, budget, lambda w=width: Planner(depth, 0, (w,), (w,)))
                print(
                    f"{temperature:4.1f}  {way.name:18} {width:2}  {show(counts, ACCEPTANCE):20} "
                    f"{show(counts, AFTER_FULL):23} {show(counts, AFTER_CUT):22} "
                    f"{show(counts, PER_ROUND, 2)}",
                    flush=True,
                )


def theorem12(bench: Bench, depth: int) -> bool:
    """False when it is below a uniform fan-out, beyond the interval."""
    print("\nfan-out of theorem 12 against a uniform one of the same budget B")
    print(
        f"{'T':>4}  {'verification':18} {'B':>2}  {'hit rate':15} {'difference':26} "
        f"{'tokens/round':13} {'difference':26} alpha  missed with F candidates "
        "after a rejection, after all accepted; fan-out"
    )
    good = True
    for way in [Way(t) for t in TEMPERATURES] + [Way(1.0, Verification.REJECTION, 1.0)]:
        for budget in BUDGETS:
            planners: list[Planner] = []

            def measured(b: int = budget, made: list[Planner] = planners) -> Planner:
                made.append(Planner(depth, b))
                return made[-1]

            ours = bench.measure(way, budget, measured)
            theirs = bench.measure(way, budget, lambda b=budget: UniformPlanner(depth, b))
            hits, highest = difference(ours, theirs, HIT_RATE)
            tokens, most = difference(ours, theirs, PER_ROUND)
            good &= highest >= 0 and most >= 0
            print(
                f"{way.temperature:4.1f}  {way.name:18} {budget:2}  "
                f"{both(ours, theirs, HIT_RATE):15} {hits:26} "
                f"{both(ours, theirs, PER_ROUND):13} {tokens:26} {rates(planners[-1], depth)}",
                flush=True,
            )
    return good


def both(ours: Counts, theirs: Counts, statistic: Statistic) -> str:
    return f"{statistic(ours.sum(axis=0)):.3f} / {statistic(theirs.sum(axis=0)):.3f}"


def rates(planner: Planner, depth: int) -> str:
    """As they were at the end, for speculations from the cache."""
    measured = planner._rates[Verification.COUPLED, True]
    laws = [f"{law.first:.2f}·F^-{law.r:.2f}" for law in (measured.rejected.law, measured.full.law)]
    counts = measured.fan_out(depth, planner._budget)
    return f"{measured.alpha.value:5.2f}  {laws[0]:11} {laws[1]:11} {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--only", choices=("guessing", "theorem12"))
    args = parser.parse_args()
    print(setting())
    print(
        f"{DRAFT} for {TARGET}, float32, K = {args.depth}; {args.prompts} prompts, "
        f"{args.seeds} seed(s) each, {args.tokens} tokens"
    )
    bench = Bench(args.prompts, args.seeds, args.tokens, args.depth)
    if args.only != "theorem12":
        guessing(bench, args.depth)
    if args.only != "guessing" and not theorem12(bench, args.depth):
        raise SystemExit("theorem 12 is below a uniform fan-out")


if __name__ == "__main__":
    main()
