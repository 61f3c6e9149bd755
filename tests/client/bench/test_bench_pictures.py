"""The report: what is drawn, read back from the drawing, and what goes to Weights & Biases."""

import re
from pathlib import Path
from typing import Any

import pytest

from ssd_client.bench.report import pictures, wandb_log
from ssd_client.bench.report.report import write_report
from ssd_client.bench.report.results import check_extra
from ssd_client.errors import ClientError

MS = 1e-3
EMPTY = {"sequence": 1, "rows": 4, "tokens": 3, "accepted": 2, "origin": "", "look_up": ""}


def event(service: str, kind: str, begin: float, ms: float, **more: Any) -> dict[str, Any]:
    return {**EMPTY, "service": service, "kind": kind, "begin": begin * MS, "seconds": ms * MS,
            "round": 0, **more}  # fmt: skip


def rounds_of(mode: str, count: int = 8) -> list[dict[str, Any]]:
    """10 ms of verification each; the draft takes 6: in turns, or at the same time."""
    turn = 6.0 if mode == "sync" else 0.0
    events = []
    for i in range(count):
        begin = (10.0 + turn) * i
        look_up = ("hit", "late", "miss_token")[i % 3] if mode == "ssd" else ""
        events += [
            event("target", "forward", begin + turn, 10.0),
            event("target", "round", begin, 10.0 + turn, round=i + 1, look_up=look_up),
        ]
        if mode == "sync":
            events.append(event("target", "draft", begin, turn))
        if mode == "ssd":
            at = [begin + 1 + 2 * depth for depth in range(3)]
            events += [event("draft", "forward", each, 1.8, round=i) for each in at]
            events.append(event("draft", "push", begin + 7.5, 0.0, round=i))
    return events


def results(complete: bool = True) -> dict[str, Any]:
    def figure(value: float) -> dict[str, float]:
        return {"median": value, "low": 0.95 * value, "high": 1.05 * value}

    rates = {"off": 100.0, "sync": 187.5, "ssd": 300.0}
    summary = [
        {"mode": mode, "load": 1.0, "decode_tokens_per_s": figure(rate), "hit_rate": figure(0.8),
         "output_throughput": figure(rate)}
        for mode, rate in rates.items()
    ]  # fmt: skip
    requests: list[dict[str, Any]] = [
        {"error": None, "arrivals": [[5.0, 1], [15.0, 3], [26.0, 2]], "e2el_ms": 27.0}
    ]
    return {
        "complete": complete,
        "command": "ssd-client bench --data 'a<b>.jsonl'",
        "client": {"system": "Linux", "machine": "x", "cores": 2, "python": "3.11"},
        "target": {"name": "stories-target", "num_parameters": 9e6, "dtype": "float32",
                   "device": "cpu", "version": "0.1.0", "synthetic_acceptance": 0.0},
        "drafts": [{"name": "stories-draft", "kind": "head", "num_parameters": 1e6,
                    "planes": [{"stream": "features", "kind": "<nccl>", "state": "up"}]}],
        "prompts": {"name": "a<b>.jsonl", "count": 3, "in_training": False},
        "settings": {"max_tokens": 64, "temperature": 0.0, "repeats": 3},
        "summary": summary,
        "theory": {**{mode: 1.02 * rate for mode, rate in rates.items()}, "ceiling": 1.6,
                   "times": {"verify": 0.01, "draft": {"tree": 0.006, "backup": 0.005}},
                   "rates": {"p": 0.8, "e_hit": 3.1, "e_miss": 2.0, "e_sync": 3.0}},
        "equality": {"compared": 12, "equal": 12, "differences": []},
        "rounds": {"ssd": {"accepted": {"0": 2, "3": 6}, "look_ups": {"0": {"late": 2},
                                                                      "3": {"hit": 5}}},
                   "sync": {"accepted": {"1": 3, "3": 5}, "look_ups": {}}},
        "delay_curve": [{"delay_ms": 0.0, "tokens_per_s": 300.0},
                        {"delay_ms": 20.0, "tokens_per_s": 297.0}],
        "timelines": {mode: rounds_of(mode) for mode in rates},
        "runs": [{"mode": mode, "requests": requests, "repeat": 0, "load": 1.0,
                  "metrics": {"output_throughput": 12.5, "rates": [0.5], "hit_rate": None}}
                 for mode in rates],
    }  # fmt: skip


Box = tuple[float, float]


def bars(svg: str, prefix: str) -> list[Box]:
    """Where rectangles whose ids begin so reach from and to, along the time axis."""
    found = []
    for match in re.finditer(r'<g id="([^"]+)">(?:<title>[^<]*</title>)?\s*<path d="([^"]+)"', svg):
        if match[1].startswith(prefix):
            xs = [float(x) for x in re.findall(r"[ML] (-?[\d.]+) ", match[2])]
            found.append((min(xs), max(xs)))
    return found


def overlapping(some: list[Box], others: list[Box]) -> int:
    """How many of the first lie, in part, where one of the others does."""
    return sum(any(a < d - 0.2 and c < b - 0.2 for c, d in others) for a, b in some)


def test_a_timeline_shows_who_works_at_the_same_time_and_who_in_turns() -> None:
    svg = pictures.timeline({mode: rounds_of(mode) for mode in ("off", "sync", "ssd")})
    target, draft = bars(svg, "ssd-target-forward"), bars(svg, "ssd-draft-forward")
    assert len(draft) >= 6
    assert overlapping(draft, target) == len(draft)
    turns, forwards = bars(svg, "sync-target-draft"), bars(svg, "sync-target-forward")
    assert len(turns) >= 2
    assert overlapping(turns, forwards) == 0
    assert "<title>target: forward, 10.00 ms, 4 rows" in svg
    # A round says what it gave in the colour of what it found; red is a miss and nothing else.
    assert "+3" in svg
    assert all(pictures.LOOK_UPS[each] in svg for each in ("hit", "late", "miss_token"))
    others = {*pictures.COLOURS.values(), pictures.AWAITED, pictures.WAIT, pictures.PREFILL}
    assert pictures.LOOK_UPS["miss_token"] not in others


NOTHING_DRAWN: dict[str, Any] = {"timelines": {}, "rounds": {}, "delay_curve": []}


def report_of(content: dict[str, Any], folder: Path) -> str:
    write_report(content, folder / "report.html")
    return (folder / "report.html").read_text()


def test_a_report_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    page = report_of(results(), tmp_path)
    # Namespaces are names, not addresses that anybody asks for.
    asked = re.findall(r'(?:src|href)="(?!#)([^"]+)"', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert asked == []
    assert "<script" not in page
    assert "a&lt;b&gt;.jsonl" in page
    assert "a<b>" not in page
    assert "outside of what the model was trained on" in page
    assert "(EAGLE-3 head, 1.0M parameters, features by &lt;nccl&gt;)" in page
    for name in ("timeline", "speed", "accepted", "hits", "latency", "delays"):
        assert f'<figure id="{name}"><svg' in page
    assert page.count("-2.0%") == 3  # measured against predicted


@pytest.mark.parametrize(("share", "words"), [(0.7, "30% below"), (1.3, "30% above"), (0.9, "")])
def test_a_run_that_does_not_fit_theory_is_marked(share: float, words: str, tmp_path: Path) -> None:
    content = {**results(), **NOTHING_DRAWN}
    content["theory"]["ssd"] = 300.0 / share
    said = re.findall(
        r'<p class="bad">ssd is (.*?) what was predicted', report_of(content, tmp_path)
    )
    assert said == ([words] if words else [])


def test_what_is_not_as_it_should_be_is_said(tmp_path: Path) -> None:
    differ = {"compared": 12, "equal": 11, "differences": [{}]}
    page = report_of({**results(complete=False), **NOTHING_DRAWN, "equality": differ}, tmp_path)
    for words in ("Interrupted", "--trace-events", "Texts differ: 11 of 12"):
        assert words in page


def test_every_run_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real library, offline. It is an extra, so it may not be there."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb_log.log_results(results(), "ssd-test")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    logged = b"".join(file.read_bytes() for file in folder.glob("*.wandb"))
    for name in (b"ssd/output_throughput", b"stories-target", b"median/ssd/1/output_throughput"):
        assert name in logged
    assert b"ssd/rates" not in logged  # what is no number is no curve


def test_an_extra_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ClientError, match=r"ssd-serve\[wandb\]"):
        check_extra("wandb", "wandb")
