"""bench, compare, status and chat against the real services, as a person uses them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from ssd.v1 import target_pb2
from ssd_client.cli import cli
from tests.client.scripted_target import ScriptedTarget
from tests.processes import TracedPair, target

TOKENS, DEPTH = 24, 5  # of a request; of the target's speculations, by default


def run(*arguments: str, exit_code: int = 0) -> click.testing.Result:
    done = click.testing.CliRunner().invoke(cli, arguments)
    assert done.exit_code == exit_code, done.output
    return done


# bench


def test_three_modes_one_table_one_report(traced_pair: TracedPair, tmp_path: Path) -> None:
    out, page, trace = (tmp_path / name for name in ("out.json", "out.html", "trace.json"))
    done = run("bench", "--target", traced_pair[0].address, "--num-prompts", "1", "--max-tokens",
               str(TOKENS), "--repeat", "1", "--ignore-eos", "--out", str(out), "--report",
               str(page), "--trace", str(trace))  # fmt: skip
    assert re.search(r"^off .*\n(.*\n)*sync .*\n(.*\n)*ssd ", done.stdout, re.MULTILINE)
    assert re.search(r"all \d+ equal those of off", done.stdout)
    assert "predicted tokens/s" in done.stdout
    content = json.loads(out.read_text())
    assert (content["complete"], len(content["runs"])) == (True, 3)
    ssd = next(row for row in content["summary"] if row["mode"] == "ssd")
    # Equality by never speculating is no result. The prefill gives a token, a round at most one
    # more than its depth, and each asks the draft.
    rounds = -((1 - TOKENS) // (1 + DEPTH))
    assert sum(ssd[name]["low"] for name in ("hits", "late_rounds", "missed_rounds")) >= rounds
    assert ssd["spec_decode_num_drafts"]["low"] >= rounds
    assert ssd["spec_decode_accepted_tokens"]["low"] > 0
    (draft,) = content["drafts"]
    assert (draft["name"], draft["kind"]) == ("stories-draft", "model")
    assert content["theory"]["ssd"] > 0
    for mode in ("off", "sync", "ssd"):
        assert any(e["kind"] == "forward" for e in content["timelines"][mode])
    assert 'id="ssd-draft-forward' in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"forward", "process_name"}


def test_a_benchmark_says_why_it_has_no_prediction(traced_pair: TracedPair) -> None:
    done = run("bench", "--target", traced_pair[0].address, "--num-prompts", "1", "--repeat", "1",
               "--max-tokens", "2", "--concurrency", "2", "--warm-up", "0")  # fmt: skip
    assert "no prediction: theorem 7 is of one request at a time" in done.stderr


# compare, models, status


def test_two_modes_compare_equal_and_a_difference_is_named_with_its_gap(
    traced_pair: TracedPair, start: Callable[..., ScriptedTarget]
) -> None:
    asked = ("compare", "--num-prompts", "1", "--max-tokens", "16", "--target")
    assert run(*asked, traced_pair[0].address).stdout.startswith("1 of 1 equal")
    other = start(tokens=16)
    done = run(*asked, traced_pair[0].address, "--target", other.address,
               "--json", exit_code=1)  # fmt: skip
    (difference,) = json.loads(done.stdout)["differences"]
    assert difference["position"] == 0
    assert difference["first"].startswith("token ")


def test_status_tells_health_links_and_rates(traced_pair: TracedPair, nobody: str) -> None:
    run(
        "generate",
        "Once",
        "--target",
        traced_pair[0].address,
        "--max-tokens",
        "24",
        "--mode",
        "ssd",
    )
    done = run("status", "--target", traced_pair[0].address, "--json")
    serving, drafting = json.loads(done.stdout)["services"]
    assert (serving["health"], drafting["health"]) == ("ready", "ready")
    assert serving["rounds"] > 0
    assert serving["hit_rate"] is not None
    assert serving["links"][0]["address"] == traced_pair[1].address
    assert (drafting["links"], drafting["kind"]) == (1, "model")
    table = run("status", "--target", traced_pair[0].address, "--target", nobody, exit_code=1)
    assert re.search("(?s)stories-draft.*cannot connect", table.stdout)
    assert "8.9M" in run("models", "--target", traced_pair[0].address).stdout


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
        assert "SYNTHETIC acceptance 0.9" in shown.stdout
        asked = ("generate", "Once", "--target", serving.address, "--logprobs", "--json")
        assert "logprobs" in run(*asked, exit_code=2).stderr
