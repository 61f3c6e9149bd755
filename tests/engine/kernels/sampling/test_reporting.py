"""Log probabilities that the device finds are those of the CPU's sampler."""

from typing import Any

import pytest
import torch

from ssd_engine.forward.result import ForwardResult
from ssd_engine.kernels.sampling import reporting
from ssd_engine.kernels.sampling.reporting import Reports
from ssd_engine.sampling.params import MAX_TOP_LOGPROBS, Logprobs
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.sampling.sampler import logprobs

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABS = [300, 256, 25] if DEVICE.type == "cpu" else [128_256, 151_936, 1000]
ROWS = 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(reporting, "PIECE", 128)
        monkeypatch.setattr(reporting, "LEAF", 16)


def report(logits: torch.Tensor, tokens: list[int], *wanted: int) -> list[Logprobs]:
    """Of rows that have drawn these tokens."""
    rows, vocab = logits.shape
    counts = torch.tensor(wanted or [MAX_TOP_LOGPROBS] * rows, dtype=torch.int32, device=DEVICE)
    reports = Reports(rows, vocab, DEVICE, overlap=False)
    pieces = -(-vocab // reporting.PIECE)
    best = torch.zeros(rows, pieces, dtype=torch.float64, device=DEVICE)
    best_token = torch.zeros(rows, pieces, dtype=torch.int32, device=DEVICE)
    for row, token in enumerate(tokens):
        best[row, token // reporting.PIECE] = 1.0
        best_token[row, token // reporting.PIECE] = token
    wide = torch.full((rows, vocab + 3), 1e6)  # columns that are no logits
    wide[:, :vocab] = logits
    reports.make(wide.to(DEVICE), counts, best, best_token)
    scored = ForwardResult(lambda: None, reported=ReportedLogprobs(reports.reported.cpu().numpy()))
    return [scored.logprobs(row, MAX_TOP_LOGPROBS) for row in range(rows)]


def same_values(values: list[float]) -> Any:
    """To the last bit; on a device, whose exponentials round in their own way, nearly so."""
    return values if DEVICE.type == "cpu" else pytest.approx(values, rel=1e-6, abs=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", ["spread out", "ties", "sure of itself", "all alike"])
def test_log_probabilities_are_those_of_the_sampler(kind: str, vocab: int) -> None:
    x = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = {
        "spread out": 3 * x,
        "ties": (2 * x).round(),
        "sure of itself": 40 * x,
        "all alike": torch.full_like(x, -7.25),
    }[kind]
    logits[:, 3] = -torch.inf
    tokens = [0, vocab - 1, vocab // 2, int(logits[3].argmax())]
    expected = logprobs(logits, tokens, [MAX_TOP_LOGPROBS] * ROWS)
    for got, told in zip(report(logits, tokens), expected, strict=True):
        assert [token for token, _ in got.top] == [token for token, _ in told.top]  # ties: lower id
        values = [got.chosen, *(value for _, value in got.top)]
        assert values == same_values([told.chosen, *(value for _, value in told.top)])


def test_each_row_is_told_as_many_likeliest_tokens_as_it_asks_for_and_as_there_are() -> None:
    logits = torch.arange(80.0).reshape(4, 20)
    logits[3, :7] = -torch.inf
    told = report(logits, [0, 1, 2, 19], 0, 3, 20, 20)
    expected = [[], [19, 18, 17], [*range(19, -1, -1)], [*range(19, 6, -1)]]
    assert [[token for token, _ in each.top] for each in told] == expected
