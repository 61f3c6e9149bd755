"""Sections of the GPU benchmark, as far as they can run without one."""

import contextlib
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from tests.harness import make_runner
from tools.bench_guessing import COLUMNS, DRAFT, FULL, FULL_HITS, ROUNDS, TOKENS
from tools.bench_kit import Generated
from tools.gpu import dense as section
from tools.gpu import guesses, report
from tools.gpu.dense import KINDS, Setting, dense, summaries
from tools.gpu.options import OPTIONS, PLAIN
from tools.gpu.serving import MODES, against

TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4200,
    max_position_embeddings=2048,
)


def generated(*tokens: int) -> Generated:
    return Generated(list(tokens), 1.0, pb.SpeculationStats())


SETTING = Setting("noisy copy", seqs=8, depth=4, budget=1, request_depths=(0, 1))


@pytest.mark.full  # two services start
def test_dense_weights_are_served_in_every_mode() -> None:
    """Real services on CPU cores. Which rounds are met there depends on the machine."""
    check_dense(dense(3, 12, [SETTING], device="cpu", changes=TINY))


class PlainClient:
    """Of services that give every prompt its own text, whatever the mode."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, int]] = set()

    def generate(
        self, prompt: str, mode: str, tokens: int, depth: int, *more: Any, **options: Any
    ) -> Generated:
        self.asked.add((mode, depth))
        stats = pb.SpeculationStats(full_rounds=1) if mode == "sync" else pb.SpeculationStats()
        first = zlib.crc32(prompt.encode()) % 1000
        return Generated(list(range(first, first + tokens)), 1.0, stats)


def test_every_mode_is_held_against_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    client = PlainClient()
    served = contextlib.nullcontext(client)
    monkeypatch.setattr(section, "_serve", lambda models, setting, device: served)
    check_dense(dense(3, 12, [SETTING], device="cpu", changes=TINY))
    assert client.asked == {("off", 0), ("sync", 0), ("ssd", 0), ("ssd", 1)}


def check_dense(rows: report.Rows) -> None:
    *checked, beside, whole = rows
    assert [(row["T"], row["how"], row["mode"]) for row in checked] == [
        (t, how, mode) for t in (0.0, 1.0) for how in ("alone", "8 at a time") for mode in MODES
    ]
    for row in checked:
        assert row["texts equal"] == "3 of 3"
        assert row["tokens equal"] == "36 of 36"
        assert report.FAILED not in row
        if row["mode"] != "ssd":
            assert (row["rejections"] + row["full acceptances"] > 0) == (row["mode"] == "sync")
    assert (beside["draft"], whole["draft"]) == ("noisy copy", "all")
    assert all(whole[kind] == sum(row[kind] for row in checked) for kind in KINDS)


def test_a_kind_of_round_that_was_never_met_fails_the_section() -> None:
    all_met: dict[str, Any] = {"seconds": 1.0, **dict.fromkeys(KINDS, 1)}
    rows = [{"draft": "a", **all_met, "hits": 0}, {"draft": "b", **all_met, "late": 0}]
    a, b, whole = summaries(rows)
    assert (a["never met"], b["never met"], whole["never met"]) == ("hits", "late", "")
    assert not any(report.FAILED in row for row in (a, b, whole))
    _, whole = summaries(rows[:1])
    assert whole[report.FAILED] == "never met: hits"


def test_a_text_that_differs_fails_the_section() -> None:
    assert report.FAILED not in against([generated(1, 2)], [[1, 2]])
    assert against([generated(1, 2), generated(3)], [[1, 2], [3, 4]]) == {
        "texts equal": "1 of 2",
        "tokens equal": "3 of 3",
        report.FAILED: "1 texts differ",
    }


@pytest.mark.full  # ways are counted in processes
def test_a_draft_is_held_against_one_on_the_cpu() -> None:
    draft = partial(make_runner, resolve_model(DRAFT), 4096, max_num_seqs=256)
    few = {name: OPTIONS[name] for name in (PLAIN, "all")}
    rows = guesses.compare(2, 12, draft, few)
    assert [row["options"] for row in rows] == [*few, "rejection", "rejection, all"]
    assert not any(report.FAILED in row for row in rows)


@pytest.mark.parametrize(("hits", "tokens", "fails"), [(8, 30, 0), (7, 30, 1), (8, 28, 1)])
def test_other_guesses_than_the_cpus_fail(hits: int, tokens: int, fails: int) -> None:
    on_cpu, counted = np.zeros((1, len(COLUMNS))), np.zeros((1, len(COLUMNS)))
    on_cpu[0, [ROUNDS, TOKENS, FULL, FULL_HITS]] = 10, 30, 10, 8
    counted[0, [ROUNDS, TOKENS, FULL, FULL_HITS]] = 10, tokens, 10, hits
    assert (report.FAILED in guesses._compared(counted, on_cpu)) == fails
