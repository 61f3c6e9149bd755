"""Penalties, bias and bans on the device give the bits that the CPU's sampler gives."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.forward.batch import Draw
from ssd_engine.forward.step_inputs import HistoryInputs, StepShape
from ssd_engine.kernels.sampling import adjusting
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import (
    MAX_BANNED_TOKENS,
    MAX_LOGIT_BIAS_ENTRIES,
    SamplingParams,
)
from ssd_engine.sampling.sampler import SampleRow, adjust_logits

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = DEVICE.type == "cpu"
VOCAB = 300 if SMALL else 128_256
RUNS, ROWS_PER_RUN = 3, 4
SHAPE = StepShape(
    rows=16, runs=RUNS, rows_per_run=ROWS_PER_RUN, max_positions=4096, block_size=16, path=5
)

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.1},
    "less than nothing": {"presence_penalty": -0.7, "frequency_penalty": -1 / 3},
    "bans": {"banned": (0, 5, 120), "banned_until": 101},
    "bias": {"logit_bias": ((0, 1.5), (5, -3.25), (77, 100.0), (299, -100.0))},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.7,
        "logit_bias": tuple((token, 0.1 * token - 9) for token in range(0, 300, 7)),
        "banned": (7, 11, 120, 299),  # some have a bias, some were said
        "banned_until": 102,  # from the third token after the history on they may be drawn
    },
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    if SMALL:
        monkeypatch.setattr(adjusting, "PIECE", 128)


def make_history(options: dict[str, Any], seed: int) -> History:
    """Some tokens several times, some in the prompt alone, some in both."""
    rng = random.Random(seed)
    prompt = [rng.randrange(150) for _ in range(40)]
    output = [rng.randrange(100, 250) for _ in range(60)]
    return History(SamplingParams(seed, **options), prompt, output)


def make_logits(seed: int, vocab: int = VOCAB) -> Tensor:
    logits = 8 * torch.randn(SHAPE.rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[:, :8] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, -torch.inf, torch.inf])
    logits[1] = logits[1].round()  # ties
    return logits


class Adjuster:
    """Steps over given logits."""

    def __init__(self, places: int = RUNS, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self._histories = Histories(places, SHAPE.rows, vocab, DEVICE, most_chained=SHAPE.path)
        self._inputs = HistoryInputs(SHAPE, DEVICE, sides=2)
        self._side = 0
        self._positions: list[int] = []

    def adjust(
        self,
        logits: Tensor,
        histories: Sequence[History | None],
        runs: Sequence[Sequence[int]],
    ) -> Tensor:
        """``runs``: the last committed token of each history, and what is verified after it."""
        draws = [
            Draw(1, 1.0, position_after(history) + i, history=history, recent=i)
            if history
            else None
            for history, tokens in zip(histories, runs, strict=True)
            for i in range(len(tokens))
        ]
        return self.draw(logits, [token for tokens in runs for token in tokens], draws)

    def draw(self, logits: Tensor, tokens: Sequence[int], draws: Sequence[Draw | None]) -> Tensor:
        self._histories.tell(self._inputs, range(len(draws)), draws)
        self._positions = [draw.position if draw else 0 for draw in draws]
        return self._adjusted(logits, tokens)

    def follow(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """A step whose rows go on, with these tokens, from what they were given before."""
        self._side = 1 - self._side
        self._inputs.use(self._side)
        self._inputs.deepen(1 - self._side)
        self._positions = [position + 1 for position in self._positions]
        return self._adjusted(logits, tokens)

    def _adjusted(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        given = torch.tensor(tokens, dtype=torch.int32, device=DEVICE)
        positions = torch.zeros(SHAPE.rows, dtype=torch.int32)
        positions[: len(tokens)] = torch.tensor(self._positions)
        on_device = logits.to(DEVICE)
        about = (given, positions.to(DEVICE), self._inputs)
        adjusted = self._histories.adjust(on_device, *about, self._histories.masks[0]).cpu()
        assert torch.equal(on_device.cpu(), logits)
        return adjusted[: len(tokens)].clone()


def position_after(history: History) -> int:
    return len(history.prompt) + len(history.output)


def expected(
    logits: Tensor, histories: Sequence[History | None], runs: Sequence[Sequence[int]]
) -> Tensor:
    rows = [
        SampleRow(h.params, h.prompt, [*h.output, *tokens[1 : i + 1]])
        if h
        else SampleRow(SamplingParams(1), (), ())
        for h, tokens in zip(histories, runs, strict=True)
        for i in range(len(tokens))
    ]
    return adjust_logits(logits[: len(rows)], rows)


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32))


def check(
    adjuster: "Adjuster",
    seed: int,
    histories: Sequence[History | None],
    runs: Sequence[Sequence[int]] | None = None,
) -> None:
    """One step: the sampler's bits."""
    logits, runs = make_logits(seed, adjuster.vocab), runs or runs_after(histories, seed)
    got = adjuster.adjust(logits, histories, runs)
    assert_same_bits(got, expected(logits, histories, runs))


def runs_after(histories: Sequence[History | None], seed: int) -> list[list[int]]:
    """Speculations of different lengths, some of whose tokens come twice or were said before."""
    rng = random.Random(seed)
    return [
        [h.output[-1] if h else 3, *(rng.choice((7, 120, 260)) for _ in range(rng.randrange(4)))]
        for h in histories
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS)
def test_logits_are_adjusted_as_the_sampler_does(options: str) -> None:
    """Round after round: what was committed is added, what was rejected is not."""
    histories: list[History | None] = [
        make_history(OPTIONS[options], 1),
        None,
        make_history(OPTIONS[options], 2),
    ]
    adjuster = Adjuster()
    for number in range(3):
        runs = runs_after(histories, number)
        check(adjuster, number, histories, runs)
        for history, tokens in zip(histories, runs, strict=True):
            if history is not None:
                history.output.extend([*tokens[1 : 1 + number], 120 + number])


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [128, 129, 1000])
def test_vocabularies_of_any_size(vocab: int) -> None:
    params = SamplingParams(
        1,
        repetition_penalty=1.7,
        frequency_penalty=0.3,
        logit_bias=((0, 1.0), (vocab - 1, 2.0)),
    )
    histories = [History(params, [0, vocab - 1], [5, vocab - 1, vocab - 1, 127])]
    check(Adjuster(vocab=vocab), 3, histories, [[127, vocab - 1, 3, 3]])


@pytest.mark.full
def test_as_many_biases_and_bans_as_there_may_be() -> None:
    vocab = 3000
    bias = tuple((2 * i, 0.01 * i) for i in range(MAX_LOGIT_BIAS_ENTRIES))
    bans = tuple(2 * i + 1 for i in range(MAX_BANNED_TOKENS))
    params = SamplingParams(1, logit_bias=bias, banned=bans, banned_until=3)
    check(Adjuster(vocab=vocab), 4, [History(params, [1], [2])], [[2]])


def test_a_sequence_that_lost_its_place_gets_another() -> None:
    """More sequences than places, in turns; each says something between two rounds."""
    all_of_them = [make_history(OPTIONS["all"], seed) for seed in range(5)]
    adjuster = Adjuster(places=2)
    for number, chosen in enumerate([(0, 1), (2, 0), (0, 3), (4, 1), (0, 4), (4, 2)]):
        histories = [all_of_them[i] for i in chosen]
        check(adjuster, number, histories)
        for history in all_of_them:
            history.output.append(100 + number)


def test_more_tokens_than_a_step_can_add() -> None:
    histories = [make_history(OPTIONS["all"], seed) for seed in range(2)]
    adjuster = Adjuster()
    for number, count in enumerate((1, SHAPE.new_tokens - 1, SHAPE.new_tokens, 3 * SHAPE.rows)):
        check(adjuster, number, histories)
        histories[0].output.extend([110, 111] * count)
        histories[1].output.append(112)


def test_branches_have_paths_of_their_own() -> None:
    """Each after the part of the chain that it leaves; some of them share a history."""
    histories = [make_history(OPTIONS["all"], seed) for seed in range(2)]
    paths = [(), (120, 7), (120, 120, 7, 7, 200), (299,), (5, 200, 5)]
    tokens = [7, 7, 200, 120, 0]
    owners = [histories[i] for i in (0, 0, 1, 1, 0)]
    draws = [
        Draw(
            *(1, 1.0, position_after(history) + len(path) + 1),
            history=history,
            recent=1,
            path=path,
        )
        for history, path in zip(owners, paths, strict=True)
    ]
    rows = [
        SampleRow(h.params, h.prompt, [*h.output, *path, token])
        for h, path, token in zip(owners, paths, tokens, strict=True)
    ]
    logits = make_logits(5)
    adjuster = Adjuster()
    got = adjuster.draw(logits, tokens, draws)
    assert_same_bits(got, adjust_logits(logits[: len(rows)], rows))
    for number, tokens in enumerate(([7, 120, 5, 120, 200], [0, 7, 5, 299, 200]), start=6):
        rows = [
            replace(row, output=[*row.output, token])
            for row, token in zip(rows, tokens, strict=True)
        ]
        got = adjuster.follow(logits := make_logits(number), tokens)
        assert_same_bits(got, adjust_logits(logits[: len(rows)], rows))


def test_a_round_of_guesses_that_were_all_right_is_added_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To write a history anew takes longer than the step."""
    written: list[int] = []
    write = Histories._write

    def counted(self: Histories, place: int, history: History) -> None:
        written.append(place)
        write(self, place, history)

    monkeypatch.setattr(Histories, "_write", counted)
    histories = [make_history(OPTIONS["repetition"], seed) for seed in range(RUNS)]
    adjuster = Adjuster()
    for number in range(3):
        check(adjuster, number, histories, [[history.output[-1]] for history in histories])
        for history in histories:
            history.output.extend(range(120, 120 + SHAPE.path + 1))
    assert len(written) == RUNS
