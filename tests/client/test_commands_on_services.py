"""bench, compare, status and chat against the real services, as a person uses them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import target_pb2
from tests.client.scripted_target import Running
from tests.client.terminal import CLIENT, terminal
from tests.processes import TracedPair, target
from tests.waiting import HANG_SECONDS

TOKENS, DEPTH = 24, 5  # of a request; of the target's speculations, by default


@pytest.fixture(scope="module")
def pair(traced_pair: TracedPair) -> TracedPair:
    return traced_pair


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*CLIENT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_SECONDS)


# bench


def bench(pair: TracedPair, *more: str) -> list[str]:
    short = ("--num-prompts", "2", "--max-tokens", str(TOKENS), "--repeat", "2", "--ignore-eos")
    return ["bench", "--target", pair[0].address, *short, *more]


def test_three_modes_one_table_one_report(pair: TracedPair, tmp_path: Path) -> None:
    out, page, trace = (tmp_path / name for name in ("out.json", "out.html", "trace.json"))
    done = run(*bench(pair, "--out", str(out), "--report", str(page), "--trace", str(trace)))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^off .*\n(.*\n)*sync .*\n(.*\n)*ssd ", done.stdout, re.MULTILINE)
    assert "all 10 equal those of off" in done.stdout
    assert "predicted tokens/s" in done.stdout
    content = json.loads(out.read_text())
    assert content["complete"] is True
    assert len(content["runs"]) == 6
    ssd = next(row for row in content["summary"] if row["mode"] == "ssd")
    # Equality by never speculating is no result. The prefill gives a token, a round at most one
    # more than its depth, and each asks the draft.
    rounds = 2 * -((1 - TOKENS) // (1 + DEPTH))
    assert sum(ssd[name]["low"] for name in ("hits", "late_rounds", "missed_rounds")) >= rounds
    assert ssd["spec_decode_num_drafts"]["low"] >= rounds
    assert ssd["spec_decode_accepted_tokens"]["low"] > 0
    assert content["target"]["name"] == "stories-target"
    assert [(draft["name"], draft["kind"]) for draft in content["drafts"]] == [
        ("stories-draft", "model")
    ]
    assert content["theory"]["ssd"] > 0
    for mode in ("off", "sync", "ssd"):
        assert any(e["kind"] == "forward" for e in content["timelines"][mode])
    assert 'id="ssd-draft-forward' in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"forward", "process_name"}


def test_a_benchmark_says_why_it_has_no_prediction(pair: TracedPair) -> None:
    done = run("bench", "--target", pair[0].address, "--num-prompts", "1", "--max-tokens", "4",
               "--repeat", "1", "--concurrency", "2", "--warm-up", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no prediction: theorem 7 is of one request at a time" in done.stderr
    assert "predicted" not in done.stdout


# compare, models, status


def test_two_modes_compare_equal(pair: TracedPair) -> None:
    done = run("compare", "--target", pair[0].address, "--num-prompts", "2", "--max-tokens", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 of 2 equal")


def test_a_difference_is_named_with_its_gap(
    pair: TracedPair, start: Callable[..., Running]
) -> None:
    other = start(tokens=16)
    done = run("compare", "--target", pair[0].address, "--target", other.address,
               "--num-prompts", "1", "--max-tokens", "16", "--json")  # fmt: skip
    assert done.returncode == 1, done.stderr
    (difference,) = json.loads(done.stdout)["differences"]
    assert difference["position"] == 0
    assert difference["first"].startswith("token ")


def test_status_tells_health_links_and_rates(pair: TracedPair, nobody: str) -> None:
    run("generate", "Once", "--target", pair[0].address, "--max-tokens", "24", "--mode", "ssd")
    done = run("status", "--target", pair[0].address, "--json")
    serving, drafting = json.loads(done.stdout)["services"]
    assert (serving["health"], drafting["health"]) == ("ready", "ready")
    assert serving["rounds"] > 0
    assert serving["hit_rate"] is not None
    assert serving["links"][0]["address"] == pair[1].address
    assert (drafting["links"], drafting["kind"]) == (1, "model")
    table = run("status", "--target", pair[0].address, "--target", nobody)
    assert table.returncode == 1
    assert "stories-draft" in table.stdout
    assert "cannot connect" in table.stdout
    listed = run("models", "--target", pair[0].address)
    assert listed.returncode == 0
    assert "8.9M" in listed.stdout


# chat


def test_a_chat_in_a_terminal(pair: TracedPair) -> None:
    flags = ("--target", pair[0].address, "--metrics", "--show-origin", "--seed", "3")
    with terminal(*flags, "--temperature", "0.5", "--max-tokens", "40") as chat:
        chat.wait_for(r"from the cache[\s\S]*> ")
        chat.type("Tell me a story about a fox.\r")
        reply = chat.wait_for(r"tokens/s · (stop|length)")
        assert re.search(r"\x1b\[3[0-9]m", reply)  # tokens have colours
        chat.wait_for("> ")
        chat.type("/mode off\r")
        chat.wait_for("mode: off")
        chat.wait_for("> ")
        chat.type("\x1b[A\x1b[A\r")  # the line before the last
        chat.wait_for("Tell me a story about a fox")
        chat.wait_for(r"tokens/s · (stop|length)")
        chat.wait_for("> ")
        chat.type("/stats\r")
        assert "2 replies" in chat.wait_for("by the target alone")
        chat.wait_for("> ")
        chat.type("\x04")  # Ctrl-D
        assert chat.wait_for_exit() == 0


def test_a_chat_can_be_piped(pair: TracedPair) -> None:
    said = "Tell me a story.\n/nonsense\n/stats\n"
    done = subprocess.run(
        [*CLIENT, "chat", "--target", pair[0].address, "--max-tokens", "12", "--show-origin"],
        input=said, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.strip()
    assert "/nonsense is not known" in done.stderr
    assert "1 replies · 12 tokens" in done.stderr


# Acceptance that is made up


def test_synthetic_acceptance_is_marked_everywhere(tmp_path: Path) -> None:
    flags = ("--draft-model", "stories-draft", "--synthetic-acceptance", "0.9", "--no-adapt-depth")
    with target(tmp_path, *flags) as serving:
        assert "texts are not the model's" in serving.log()
        info: Any = serving.stub().GetModelInfo(target_pb2.GetModelInfoRequest())
        assert "synthetic-0.9" in info.fingerprint
        done = run("generate", "Once", "--target", serving.address, "--max-tokens", "120",
                   "--seed", "1", "--ignore-eos", "--mode", "sync", "--json")  # fmt: skip
        stats = json.loads(done.stdout)["speculation"]
        assert stats["synthetic_acceptance"] == pytest.approx(0.9)
        first = stats["accepted_per_position"][0] / stats["drafted_per_position"][0]
        assert 0.7 < first <= 1.0
        shown = run("bench", "--target", serving.address, "--num-prompts", "1", "--repeat", "1",
                    "--max-tokens", "8")  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert "SYNTHETIC acceptance 0.9" in shown.stdout
        refused = run("generate", "Once", "--target", serving.address, "--logprobs", "--json")
        assert refused.returncode == 2
        assert "logprobs" in refused.stderr
