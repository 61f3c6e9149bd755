"""The report: what is drawn, read back from the drawing; in a browser where there is one."""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_client.bench.report import pictures
from ssd_client.bench.report.report import write_report
from tests.suite.tools import needs_tool, tool

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
MS = 1e-3
EMPTY = {"sequence": 1, "rows": 4, "tokens": 3, "accepted": 2, "origin": "", "look_up": ""}


def event(service: str, kind: str, begin: float, ms: float, **more: Any) -> dict[str, Any]:
    return {**EMPTY, "service": service, "kind": kind, "begin": begin * MS, "seconds": ms * MS,
            "round": 0, **more}  # fmt: skip


def rounds_of(mode: str, count: int = 8) -> list[dict[str, Any]]:
    """10 ms of verification each; the draft takes 6: in turns, or at the same time."""
    events = []
    for i in range(count):
        at = 16.0 * i if mode == "sync" else 10.0 * i
        if mode == "sync":
            events.append(event("target", "draft", at, 6.0))
            at += 6.0
        if mode == "ssd":
            events += [event("draft", "forward", at + 1 + 2 * d, 1.8, round=i) for d in range(3)]
            events.append(event("draft", "push", at + 7.5, 0.0, round=i))
        events.append(event("target", "forward", at, 10.0))
        look_up = ("hit", "late", "miss_token")[i % 3] if mode == "ssd" else ""
        begin, ms = (16.0 * i, 16.0) if mode == "sync" else (at, 10.0)
        events.append(event("target", "round", begin, ms, round=i + 1, look_up=look_up))
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
        "runs": [{"mode": mode, "requests": requests} for mode in rates],
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


def test_a_round_says_what_it_gave_in_the_colour_of_what_it_found() -> None:
    svg = pictures.timeline({"ssd": rounds_of("ssd")})
    for look_up in ("hit", "late", "miss_token"):
        assert pictures.LOOK_UPS[look_up] in svg
    assert "+3" in svg


def test_a_report_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_report(results(), file)
    page = file.read_text()
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
    content, file = results(), tmp_path / "report.html"
    measured = {row["mode"]: row["decode_tokens_per_s"]["median"] for row in content["summary"]}
    content["theory"]["ssd"] = measured["ssd"] / share
    write_report(content, file)
    said = re.findall(r'<p class="bad">ssd is (.*?) what was predicted', file.read_text())
    assert said == ([words] if words else [])


def test_red_is_a_miss_and_nothing_else() -> None:
    red = pictures.LOOK_UPS["miss_token"]
    others = {*pictures.COLOURS.values(), pictures.AWAITED, pictures.WAIT, pictures.PREFILL}
    assert red not in others


def test_half_of_a_benchmark_says_so_in_its_report(tmp_path: Path) -> None:
    content = results(complete=False)
    del content["timelines"], content["rounds"], content["theory"]
    write_report(content, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Interrupted" in page
    assert "--trace-events" in page


def test_texts_that_differ_are_not_passed_over(tmp_path: Path) -> None:
    content = results()
    content["equality"] = {"compared": 12, "equal": 11, "differences": [{}]}
    write_report(content, tmp_path / "report.html")
    assert "Texts differ: 11 of 12" in (tmp_path / "report.html").read_text()


# In a browser

PROBE = """<!doctype html><body><iframe id="page" src="report.html" width="1200" height="3000">
</iframe><script>
document.getElementById("page").onload = function () {
  const page = this.contentDocument, found = {};
  for (const element of page.querySelectorAll("figure svg [id]")) {
    const box = element.getBoundingClientRect();
    found[element.id] = [box.left, box.right, box.top, box.bottom];
  }
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.appendChild(out);
};
</script></body>"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tmp_path, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def drawn(folder: Path, url: str) -> dict[str, list[float]]:
    """Where a browser draws what has an id: left, right, top, bottom."""
    (folder / "probe.html").write_text(PROBE)
    command = [
        tool(*CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu",
        "--virtual-time-budget=20000", f"--user-data-dir={folder}/profile",
        "--dump-dom", f"{url}/probe.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    boxes: dict[str, list[float]] = json.loads(found[1])
    return boxes


@needs_tool("Chromium", *CHROMIUM)
def test_a_browser_draws_target_and_draft_over_each_other_in_ssd_and_in_turns_in_sync(
    served: tuple[Path, str],
) -> None:
    folder, url = served
    write_report(results(), folder / "report.html")
    boxes = drawn(folder, url)

    def of(prefix: str) -> list[Box]:
        return [(box[0], box[1]) for name, box in boxes.items() if name.startswith(prefix)]

    draft, target = of("ssd-draft-forward"), of("ssd-target-forward")
    assert len(draft) >= 6
    assert all(right > left for left, right in draft + target)
    assert overlapping(draft, target) == len(draft)
    turns = of("sync-target-draft")
    assert len(turns) >= 2
    assert overlapping(turns, of("sync-target-forward")) == 0
    lanes = {name.split("-")[1] for name in boxes if name.startswith("ssd-") and "forward" in name}
    assert lanes == {"target", "draft"}
    heights = [boxes[f"speed-{mode}"] for mode in ("off", "sync", "ssd")]
    off, sync, ssd = (bottom - top for _, _, top, bottom in heights)
    assert off < sync < ssd
