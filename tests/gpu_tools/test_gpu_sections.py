"""Sections of the GPU benchmark, as far as they can run without one, and what makes them fail."""

import contextlib
import json
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_store import resolve_model
from tests.harness import make_runner
from tools.bench_guessing import COLUMNS, DRAFT, FULL, FULL_HITS, ROUNDS, TOKENS
from tools.bench_kit import Generated
from tools.gpu import bench, guesses, report
from tools.gpu import dense as section
from tools.gpu import features as features_section
from tools.gpu import head_comes as coming_section
from tools.gpu.dense import KINDS, Setting, dense, summaries
from tools.gpu.features import features
from tools.gpu.heads import DEPTH, Place, heads, rows_to_tell
from tools.gpu.options import OPTIONS, PLAIN
from tools.gpu.report import FAILED
from tools.gpu.serving import MODES, against
from tools.gpu.shapes import SHAPES

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
        assert FAILED not in row
        if row["mode"] != "ssd":
            assert (row["rejections"] + row["full acceptances"] > 0) == (row["mode"] == "sync")
    assert (beside["draft"], whole["draft"]) == ("noisy copy", "all")
    assert all(whole[kind] == sum(row[kind] for row in checked) for kind in KINDS)


def test_a_kind_of_round_that_was_never_met_fails_the_section() -> None:
    all_met: dict[str, Any] = {"seconds": 1.0, **dict.fromkeys(KINDS, 1)}
    rows = [{"draft": "a", **all_met, "hits": 0}, {"draft": "b", **all_met, "late": 0}]
    a, b, whole = summaries(rows)
    assert (a["never met"], b["never met"], whole["never met"]) == ("hits", "late", "")
    assert not any(FAILED in row for row in (a, b, whole))
    _, whole = summaries(rows[:1])
    assert whole[FAILED] == "never met: hits"


def test_a_text_that_differs_fails_the_section() -> None:
    assert FAILED not in against([generated(1, 2)], [[1, 2]])
    assert against([generated(1, 2), generated(3)], [[1, 2], [3, 4]]) == {
        "texts equal": "1 of 2",
        "tokens equal": "3 of 3",
        FAILED: "1 texts differ",
    }


@pytest.mark.full  # ways are counted in processes
def test_a_draft_is_held_against_one_on_the_cpu() -> None:
    draft = partial(make_runner, resolve_model(DRAFT), 4096, max_num_seqs=256)
    few = {name: OPTIONS[name] for name in (PLAIN, "all")}
    rows = guesses.compare(2, 12, draft, few)
    assert [row["options"] for row in rows] == [*few, "rejection", "rejection, all"]
    assert not any(FAILED in row for row in rows)


@pytest.mark.parametrize(("hits", "tokens", "fails"), [(8, 30, 0), (7, 30, 1), (8, 28, 1)])
def test_other_guesses_than_the_cpus_fail(hits: int, tokens: int, fails: int) -> None:
    on_cpu, counted = np.zeros((1, len(COLUMNS))), np.zeros((1, len(COLUMNS)))
    on_cpu[0, [ROUNDS, TOKENS, FULL, FULL_HITS]] = 10, 30, 10, 8
    counted[0, [ROUNDS, TOKENS, FULL, FULL_HITS]] = 10, tokens, 10, hits
    assert (FAILED in guesses._compared(counted, on_cpu)) == fails


# Heads


CPU = Place(
    device="cpu",
    shape="",
    row_bytes=3 * 256 * 4,
    prompts=2,
    tokens=24,
    long_prompt=300,
    repeats=1,
    has_limits=False,
)


def test_rows_to_tell_are_those_of_committed_tokens() -> None:
    """All rows of each round are more than that, with usual acceptance."""
    tokens, prompt, rounds = 128, 20, 40
    done = [Generated([7] * tokens, 1.0, pb.SpeculationStats(rounds=rounds), prompt=prompt)] * 4
    least, most = rows_to_tell(done)
    assert most == 4 * (prompt + tokens - 1)
    assert least == most - 4 * 2 * (DEPTH + 1)
    assert 4 * (prompt + rounds * (DEPTH + 1)) > most
    assert rows_to_tell([Generated([7, 7], 1.0, done[0].stats, cached=16, prompt=20)])[1] == 5


@pytest.mark.full  # five services start
def test_heads_are_rehearsed_on_a_cpu() -> None:
    rows = heads(CPU)
    assert not any(FAILED in row for row in rows), rows
    modes = {row["mode"] for row in rows}
    assert modes >= {"off", "sync", "ssd", "features late", "a head, as it comes"}
    assert modes >= {f"ssd, a head, {depth} deep" for depth in (1, 2, DEPTH)}


SMALL = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4200,
}
SLOW_HOST = features_section.Place(
    device="cpu",
    dtype="float32",
    shape=SMALL,
    boundaries=(1, 2, 3),
    draft_vocab=1000,
    length=256,
    turns=1,
    repeats=1,
    tokens=20,
    has_limits=False,
)


def test_what_features_cost_is_rehearsed_on_a_cpu() -> None:
    rows = features(SLOW_HOST)
    assert not any(FAILED in row for row in rows), rows
    [told] = [row for row in rows if row["measured"].startswith("rows told")]
    assert told["off by"] < 1e-4


def test_a_head_that_comes_is_rehearsed_on_a_cpu() -> None:
    rows = coming_section.head_comes(replace(coming_section.REHEARSED, length=256))
    assert not any(FAILED in row for row in rows), rows
    assert [row["boundaries"] for row in rows] == ["1 2", "2 3", "0 1"]
    late = coming_section.Waits([4.0] * 20, [5.0, 25.0], [9.0])
    assert coming_section._row(coming_section.GPU, late)[FAILED].startswith("streams wait 21.0 ms")


# A section that fails says so, and the command does


def run_bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("rows", "code"), [([{"a": 1}], 0), ([{"a": 1}, {"a": 2, FAILED: "2 is odd"}], 1)]
)
def test_a_section_that_fails_is_written_and_has_an_exit_code(
    rows: report.Rows,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(bench.SECTIONS, "plain", lambda args: rows)
    assert run_bench(monkeypatch, "plain", "--out", str(tmp_path), "--commit", "x") == code
    assert json.loads((tmp_path / "plain.json").read_text())["rows"] == rows
    printed = capsys.readouterr().out
    assert "| a |" in printed
    assert ("plain failed: 2 is odd" in printed) == bool(code)


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0], 0), ([0, 1, 0], 1), ([0, 0, -9], 1)])
def test_of_several_sections_all_run_and_one_that_fails_is_enough(
    codes: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        ran.append(command[3])
        return SimpleNamespace(returncode=codes[len(ran) - 1])

    monkeypatch.setattr(subprocess, "run", run)
    assert run_bench(monkeypatch, "plain", "gap", "tree") == code
    assert ran == ["plain", "gap", "tree"]
