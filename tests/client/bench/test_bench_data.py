"""The prompts of a benchmark, and what their results come to. No services here."""

import csv
import errno
import json
import urllib.parse
from pathlib import Path
from unittest.mock import Mock

import pytest

from ssd_client.bench.measure import prompts
from ssd_client.bench.measure.equality import compare_texts, first_difference
from ssd_client.bench.measure.metrics import interval, metrics_of, percentile
from ssd_client.bench.measure.prompts import STORIES, load_prompts
from ssd_client.bench.measure.requests import MeasuredRequest, closed_loop, open_loop
from ssd_client.bench.measure.rounds import add_rounds
from ssd_client.bench.measure.settings import RunKey, Settings
from ssd_client.bench.report.results import Results, read_results
from ssd_client.bench.report.table import show_results
from ssd_client.errors import BadInputError, ClientError
from ssd_client.generate.speculation import SpeculationStats
from tests.client.http_server import QuietHandler, serving

# Prompts


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 7}\n')
    found = load_prompts(str(file), 10, 0)
    assert (found.name, found.in_training) == ("some.jsonl", False)
    assert sorted(found.prompts) == ["one", "two"]


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


def test_stories_ship_with_it_and_a_seed_decides_which() -> None:
    first, again, other = (load_prompts(STORIES, 8, seed).prompts for seed in (1, 1, 2))
    assert len(set(first)) == 8
    assert first == again != other


class Hub(QuietHandler):
    """The hub's server of rows, as far as it is asked here."""

    rows = 130

    def do_GET(self) -> None:
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        first, count = int(asked["offset"]), int(asked["length"])
        place = [asked[name] for name in ("dataset", "config", "split")]
        known = place == ["openai/gsm8k", "main", "test"] and count <= 100
        rows = range(first, min(first + count, self.rows))
        content = {"rows": [{"row": {"question": f"question {i}"}} for i in rows]}
        self.answer(200 if known else 404, json.dumps(content).encode())


def test_a_set_of_a_hub_is_fetched_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub) as url:
        monkeypatch.setattr(prompts, "_HUB", f"{url}/rows")
        found = load_prompts("gsm8k", 120, 0)
        assert sorted(found.prompts) == sorted(f"question {i}" for i in range(120))
        assert len(load_prompts("gsm8k", 500, 0).prompts) == Hub.rows
        with pytest.raises(ClientError, match="--data humaneval: the hub cannot be reached"):
            load_prompts("humaneval", 3, 0)


# Requests


def ask(number: int, prompt: str) -> MeasuredRequest:
    return MeasuredRequest(number, 0.0, 1.0, [(0.25, 1), (0.5, 2), (1.0, 1)], [1, 2, 3, 4], prompt)


def test_requests_come_back_in_the_order_of_their_prompts() -> None:
    seen: list[MeasuredRequest] = []
    for done in (
        closed_loop(ask, ["a", "b", "c"], 2, seen.append),
        open_loop(ask, ["a", "b", "c"], 1e4, 0, seen.append),  # a Poisson process by a seed
    ):
        assert [each.text for each in done] == ["a", "b", "c"]
    assert len(seen) == 6


def test_the_times_of_a_request() -> None:
    measured = ask(0, "x")
    assert (measured.ttft_s, measured.e2el_s, measured.num_tokens) == (0.25, 1.0, 4)
    assert (measured.itls_s, measured.tpot_s) == ([0.25, 0.5], 0.25)


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


def test_percentiles_lie_between_values_and_an_interval_holds_its_median() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    found = interval([3.0, 1.0, 2.0, 2.5, 1.5])
    assert (found.low, found.median, found.high) == (1.0, 2.0, 3.0)  # so few have a range
    enough = interval([1.0, 2.0, 2.0, 2.0, 2.0, 90.0])
    assert enough.low <= enough.median == 2.0 <= enough.high < 90.0


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
    assert (found.compared, found.of, found.as_json()["equal"]) == (2, "off", 1)
    assert (difference.prompt, difference.run.mode, difference.other.mode) == (1, "ssd", "off")
    assert (difference.position, difference.token, difference.expected) == (1, 5, 6)
    # A text that ends early is another text.
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


# Results


ROUNDS = {"accepted": {"2": 3}, "look_ups": {"2": {"hit": 1}}}


def results(measured: int = 0, **changed: object) -> Results:
    """Of a benchmark of which so many runs are done."""
    settings = Settings(data="stories", num_prompts=1, modes=("off", "ssd"), repeats=2, **changed)
    about = {
        "command": "ssd-client bench",
        "client": {},
        "target": {"name": "t", "fingerprint": "f", "address": "a:1"},
        "drafts": [],
        "prompts": {"name": "stories", "count": 1, "in_training": True},
    }
    found = Results(settings, about)
    for key in list(settings.runs())[:measured]:
        found.add(key, {"output_throughput": 7.0}, [], ROUNDS)
    return found


def test_the_setting_names_the_kinds_of_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(measured=4)
    found.about["target"] |= {"num_parameters": 9_000_000, "dtype": "float32", "device": "cpu"}
    found.about["target"]["synthetic_acceptance"] = 0.0
    found.about["target"]["draft_inside"] = {"kind": "head", "name": "own"}
    plane = {"stream": "features", "kind": "nccl", "state": "up"}
    found.about["drafts"] = [
        {"name": "eagle", "kind": "head", "planes": [plane]},
        {"name": "ngram", "kind": "ngram", "planes": []},
    ]
    show_results(found)
    drafts = "eagle (EAGLE-3 head, features by nccl), ngram (n-gram), own (EAGLE-3 head) inside"
    assert f"draft {drafts};" in " ".join(capsys.readouterr().out.split())


def test_modes_take_turns() -> None:
    runs = list(Settings("x", 1, ("off", "ssd"), concurrency=(1, 4)).runs())
    assert [key.mode for key in runs] == ["off", "ssd"] * 6
    assert [key.load for key in runs[:4]] == [1.0, 1.0, 4.0, 4.0]


def test_half_of_a_benchmark_is_marked_and_goes_on(tmp_path: Path) -> None:
    file, first, second = tmp_path / "out.json", results(measured=2), results()
    first.more = {"timelines": {"off": []}, "theory": {"ssd": 9.0}, "equality": {}}
    first.save(file)
    assert read_results(file)["complete"] is False
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
    results().save(file)
    with pytest.raises(BadInputError, match=r"another max_tokens \(128, not 64\)"):
        results(max_tokens=64).resume(file)
    other = results()
    other.about["target"]["fingerprint"] = "g"
    with pytest.raises(BadInputError, match="another target"):
        other.resume(file)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}', "{", '{"format": 1}'])
def test_a_file_of_something_else_cannot_go_on(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out.json"
    file.write_text(content)
    with pytest.raises(BadInputError, match=str(file)):
        results().resume(file)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    results().save(file)
    before, full = file.read_bytes(), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    with pytest.raises(ClientError, match="No space left"):
        results(measured=1).save(file)
    assert file.read_bytes() == before


def test_a_table_for_other_programs(tmp_path: Path) -> None:
    found = results()
    found.add(RunKey(0, 1.0, "off"), {"output_throughput": 7.0, "rates": [0.5, 0.25]}, [])
    found.add(RunKey(0, 1.0, "ssd"), {"hit_rate": None}, [])
    found.save_csv(tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert (rows[0]["output_throughput"], rows[0]["rates"]) == ("7.0", "0.5000 0.2500")
    assert rows[1]["mode"] == "ssd"
