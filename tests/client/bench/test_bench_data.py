"""The prompts of a benchmark, and what their results come to. No services here."""

from __future__ import annotations

import csv
import http.server
import json
import os
import threading
import urllib.parse
from pathlib import Path

import pytest

from ssd_client.bench.measure import prompts
from ssd_client.bench.measure.equality import compare_texts, first_difference
from ssd_client.bench.measure.metrics import interval, metrics_of, percentile
from ssd_client.bench.measure.prompts import STORIES, load_prompts
from ssd_client.bench.measure.requests import MeasuredRequest, closed_loop, open_loop
from ssd_client.bench.measure.rounds import add_rounds
from ssd_client.bench.measure.settings import RunKey, Settings
from ssd_client.bench.report.results import Results, check_output, read_results
from ssd_client.bench.report.table import show_results
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.speculation import SpeculationStats

# Prompts


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 7}\n')
    found = load_prompts(str(file), 10, 0)
    assert (found.name, sorted(found.prompts), found.in_training) == (
        "some.jsonl",
        ["one", "two"],
        False,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "one"}\n{"prompt": \n', "line 2: not JSON"),
        (b'{"prompt": "one"}\n["two"]\n', 'line 2: an object with a text "prompt" is needed'),
        (b'{"text": "one"}\n', 'line 1: an object with a text "prompt" is needed'),
        (b'{"prompt": "  "}\n', "line 1: the prompt is empty"),
        (b'{"prompt": "\xff"}\n', "line 1: not valid UTF-8"),
        (b"\n\n", "no prompts in it"),
        (b'{"prompt": "\\ud800"}\n', "line 1: the prompt has half a character"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        load_prompts(str(file), 10, 0)


def test_a_file_that_is_not_there_names_what_would_be() -> None:
    with pytest.raises(BadInputError, match=r"No such file.*stories, humaneval, gsm8k"):
        load_prompts("nowhere.jsonl", 10, 0)


def test_stories_ship_with_it_and_a_seed_decides_which() -> None:
    first, again, other = (load_prompts(STORIES, 8, seed).prompts for seed in (1, 1, 2))
    assert len(set(first)) == 8
    assert first == again != other


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's server of rows, as far as it is asked here."""

    rows = 130

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        known = (asked["dataset"], asked["config"], asked["split"]) == (
            "openai/gsm8k",
            "main",
            "test",
        )
        first, count = int(asked["offset"]), int(asked["length"])
        rows = range(first, min(first + count, self.rows)) if known and count <= 100 else ()
        content = {"rows": [{"row": {"question": f"question {i}"}} for i in rows]}
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


def test_a_set_of_a_hub_is_fetched_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/rows"
    monkeypatch.setattr(prompts, "_HUB", address)
    try:
        found = load_prompts("gsm8k", 120, 0)
        assert sorted(found.prompts) == sorted(f"question {i}" for i in range(120))
        assert len(load_prompts("gsm8k", 500, 0).prompts) == Hub.rows
        with pytest.raises(ClientError, match="--data humaneval: the hub cannot be reached"):
            load_prompts("humaneval", 3, 0)
    finally:
        server.shutdown()


# Requests


def ask(number: int, prompt: str) -> MeasuredRequest:
    return MeasuredRequest(number, 0.0, 1.0, [(0.25, 1), (0.5, 2), (1.0, 1)], [1, 2, 3, 4], prompt)


def test_requests_come_back_in_the_order_of_their_prompts() -> None:
    seen: list[MeasuredRequest] = []
    done = closed_loop(ask, ["a", "b", "c"], 2, seen.append)
    assert [each.text for each in done] == ["a", "b", "c"]
    assert len(seen) == 3


def test_a_poisson_process_takes_its_time_from_the_seed() -> None:
    done = open_loop(ask, ["a", "b"], 1e4, 0, lambda measured: None)
    assert [each.text for each in done] == ["a", "b"]


def test_the_times_of_a_request() -> None:
    measured = ask(0, "x")
    assert (measured.ttft_s, measured.e2el_s, measured.num_tokens) == (0.25, 1.0, 4)
    assert measured.itls_s == [0.25, 0.5]
    assert measured.tpot_s == 0.25


# Metrics


def test_the_keys_are_those_of_vllm_and_ours() -> None:
    stats = SpeculationStats(
        "ssd", rounds=10, hits=6, late=1, token_misses=3, cache_rounds=7, plain_rounds=2,
        drafted_tokens=24, accepted_tokens=18, cache_tokens=15, wait_micros=20_000,
        accepted_per_position=(8, 6, 4), rejected_rounds=4, full_rounds=4,
    )  # fmt: skip
    done = [MeasuredRequest(0, 0.0, 1.0, [(0.5, 1), (1.0, 9)], [], "", 5, stats)]
    found = metrics_of([*done, MeasuredRequest(1, 0.0, 1.0, error="lost")], 2.0, 2)
    expected = {
        "completed": 1,
        "failed": 1,
        "total_input_tokens": 5,
        "total_output_tokens": 10,
        "request_throughput": 0.5,
        "output_throughput": 5.0,
        "mean_ttft_ms": 500.0,
        "median_itl_ms": 500.0,
        "p99_e2el_ms": 1000.0,
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_num_drafts": 8,
        "hit_rate": 0.6,
        "late_rounds": 1,
        "missed_rounds": 3,
        "tokens_per_round_hit": 22 / 7,
        "tokens_per_round_miss": 2.0,
        "wait_per_round_ms": 2.0,
        "tokens_per_s_per_device": 2.5,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.75, 0.5]


def test_percentiles_lie_between_values() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_an_interval_holds_its_median() -> None:
    found = interval([3.0, 1.0, 2.0, 2.5, 1.5])
    assert 1.0 <= found.low <= found.median == 2.0 <= found.high <= 3.0


# Equality


def run_of(*texts: list[int], error: str | None = None) -> dict:
    requests = [{"prompt": i, "tokens": text, "error": error} for i, text in enumerate(texts)]
    return {"metrics": {}, "requests": requests}


def test_texts_are_held_against_plain_decoding() -> None:
    runs = {
        RunKey(0, 1.0, "ssd"): run_of([1, 2, 3], [4, 5]),
        RunKey(0, 1.0, "off"): run_of([1, 2, 3], [4, 6]),
        RunKey(0, 1.0, "openai:http://x/v1"): run_of([9], [9]),
    }
    found = compare_texts(runs)
    (difference,) = found.differences
    assert (found.compared, found.of) == (2, "off")
    assert (difference.prompt, difference.run.mode, difference.other.mode) == (1, "ssd", "off")
    assert (difference.position, difference.token, difference.expected) == (1, 5, 6)
    assert found.as_json()["equal"] == 1


def test_a_text_that_ends_early_is_another_text() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


# Results


def results(tmp_path: Path, **changed: object) -> Results:
    settings = Settings(data="stories", num_prompts=1, modes=("off", "ssd"), repeats=2, **changed)
    about = {
        "command": "ssd-client bench",
        "client": {},
        "target": {"name": "t", "fingerprint": "f", "address": "a:1"},
        "drafts": [],
        "prompts": {"name": "stories", "count": 1, "in_training": True},
    }
    return Results(settings, about)


def test_the_setting_names_the_kinds_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(tmp_path)
    found.about["target"] |= {"num_parameters": 9_000_000, "dtype": "float32", "device": "cpu"}
    found.about["target"]["synthetic_acceptance"] = 0.0
    found.about["target"]["draft_inside"] = {"kind": "head", "name": "own"}
    plane = {"stream": "features", "kind": "nccl", "state": "up"}
    found.about["drafts"] = [
        {"name": "eagle", "kind": "head", "planes": [plane]},
        {"name": "ngram", "kind": "ngram", "planes": []},
    ]
    for key in found.settings.runs():
        found.add(key, {"output_throughput": 7.0}, [])
    show_results(found)
    said = capsys.readouterr().out
    said = " ".join(said.split())
    drafts = "eagle (EAGLE-3 head, features by nccl), ngram (n-gram), own (EAGLE-3 head) inside"
    assert f"draft {drafts};" in said


def test_modes_take_turns() -> None:
    settings = Settings(data="x", num_prompts=1, modes=("off", "ssd"), concurrency=(1, 4))
    runs = list(settings.runs())
    assert [key.mode for key in runs] == ["off", "ssd"] * 6
    assert [key.load for key in runs[:4]] == [1.0, 1.0, 4.0, 4.0]


def test_half_of_a_benchmark_is_marked_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    first = results(tmp_path)
    rounds = {"accepted": {"2": 3}, "look_ups": {"2": {"hit": 1}}}
    for key in list(first.settings.runs())[:2]:
        first.add(key, {"output_throughput": 7.0}, [], rounds)
    first.more = {"timelines": {"off": []}, "theory": {"ssd": 9.0}, "equality": {}}
    first.save(file)
    assert read_results(file)["complete"] is False
    second = results(tmp_path)
    assert second.resume(file) == 2
    assert second.more == {"timelines": {"off": []}, "theory": {"ssd": 9.0}}
    counted = [run["rounds"] for run in second.runs.values()]
    assert add_rounds(counted) == {"accepted": {"2": 6}, "look_ups": {"2": {"hit": 2}}}
    for key in second.settings.runs():
        if key not in second.runs:
            second.add(key, {"output_throughput": 9.0}, [])
    second.save(file)
    content = read_results(file)
    assert content["complete"] is True
    assert [run["metrics"]["output_throughput"] for run in content["runs"]] == [7, 7, 9, 9]
    assert content["summary"][0]["output_throughput"] == {"median": 8.0, "low": 7.0, "high": 9.0}


def test_other_settings_or_another_model_cannot_go_on(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    results(tmp_path).save(file)
    with pytest.raises(BadInputError, match=r"another max_tokens \(128, not 64\)"):
        results(tmp_path, max_tokens=64).resume(file)
    other = results(tmp_path)
    other.about["target"]["fingerprint"] = "g"
    with pytest.raises(BadInputError, match="another target"):
        other.resume(file)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}', "{", '{"format": 1}'])
def test_a_file_of_something_else_cannot_go_on(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out.json"
    file.write_text(content)
    with pytest.raises(BadInputError, match=str(file)):
        results(tmp_path).resume(file)


def test_what_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    check_output("--out", tmp_path / "out.json")
    for path, message in ((tmp_path, "this is a folder"), (tmp_path / "no" / "x", "not exist")):
        with pytest.raises(BadInputError, match=message):
            check_output("--out", path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    results(tmp_path).save(file)
    before = file.read_bytes()

    def full(path: Path, text: str, **more: object) -> int:
        with open("/dev/full", "w") as device:
            return device.write(text)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ClientError, match="No space left"):
        results(tmp_path).save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_table_for_other_programs(tmp_path: Path) -> None:
    found = results(tmp_path)
    found.add(RunKey(0, 1.0, "off"), {"output_throughput": 7.0, "rates": [0.5, 0.25]}, [])
    found.add(RunKey(0, 1.0, "ssd"), {"hit_rate": None}, [])
    found.save_csv(tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert rows[0]["output_throughput"] == "7.0"
    assert rows[0]["rates"] == "0.5000 0.2500"
    assert rows[1]["mode"] == "ssd"
    assert json.dumps(found.as_json())
