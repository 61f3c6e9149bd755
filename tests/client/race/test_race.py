"""`ssd-client race` against scripted targets: who runs, what is said, what a terminal shows."""

import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from ssd.v1 import target_pb2
from ssd_client.cli import cli
from ssd_client.connection.security import PLAIN
from ssd_client.errors import BadInputError
from ssd_client.generate.events import Started, Tokens
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.race.command import _local_heats
from ssd_client.race.lanes import Lane, Run, differing, verdict
from ssd_client.race.screen import Columns
from ssd_client.terminal.local_pair import plan_pair
from tests.client.scripted_target import full_text, full_tokens

LOCAL = {
    "local_model": None,
    "local_draft": None,
    "local_device": "cpu",
    "local_draft_device": None,
    "local_mps": False,
    "local_draft_share": None,
    "local_expand_to": "hidden=512",
    "local_draft_expand_to": "hidden=384",
    "local_target_options": ["--depth", "3"],
    "local_draft_options": None,
    "modes": (),
    "security": PLAIN,
}


def race(*arguments):
    return CliRunner().invoke(cli, ["race", *arguments])


def told(mode: str, tokens: list[int], seconds: float, title: str = "") -> Run:
    """A lane whose tokens came one by one in that time, after the first."""
    run = Run(Lane(mode, "somewhere", title))
    run.result = GenerationResult(Timing(sent=0.0))
    run.result.add(Started("a", "", 1, 1, ""), 0.0)
    for i, token in enumerate(tokens):
        tokens_event = Tokens((token,), f"{token} ", origins=("cache",), pieces=(f"{token} ",))
        run.result.add(tokens_event, i * seconds / (len(tokens) - 1))
        run.take(tokens_event)
    return run


def test_every_mode_of_a_target_tells_the_same_text(start):
    server = start(pause_s=0.005)
    asked = ("Hello", "--target", server.address, "--max-tokens", "12", "--seed", "4")
    result = race(*asked)
    assert result.exit_code == 0, result.stderr
    off, ssd = target_pb2.SPECULATION_MODE_OFF, target_pb2.SPECULATION_MODE_SSD
    asked_for = [(each.speculation.mode, each.sampling.seed) for each in server.requests]
    assert asked_for == [(off, 4), (off, 4), (ssd, 4), (ssd, 4)]  # warm, and told
    assert full_text(12, 4) in result.stdout
    assert re.search(r"ssd: [\d.]+ × as fast as off · all 2 texts are equal", result.stdout)
    assert re.search(r"off: [\d.]+ tokens/s · 12 tokens", result.stderr)
    content = json.loads(race(*asked, "--json").stdout)
    assert (content["seed"], content["equal"], content["text"]) == (4, True, full_text(12, 4))
    ssd_lane = content["lanes"]["ssd"]
    assert (ssd_lane["tokens"], ssd_lane["tokens_per_s"] > 0) == (12, True)


@pytest.mark.parametrize(
    ("script", "flags", "exit_code", "words"),
    [
        ({"by_mode": True}, (), 1, "the texts of off and ssd DIFFER at token 0"),
        ({}, ("--mode", "sync"), 2, "--mode sync: 127.0.0.1.*has off, ssd"),
        (
            {"speculation": {"rounds": 3, "sync_rounds": 3}},
            ("--mode", "ssd"),
            0,
            "served otherwise than asked: ssd as sync",
        ),
    ],
)
def test_a_race_that_is_none_says_so(start, script, flags, exit_code, words):
    server = start(**script)
    result = race("Hello", "--target", server.address, *flags)
    assert result.exit_code == exit_code
    assert re.search(words, result.output)
    assert len({request.sampling.seed for request in server.requests}) < 2  # made up for all


def test_what_is_said_at_the_end():
    ids = full_tokens(11)
    runs = [
        told("off", ids, 10.0, "off on one core"),
        told("sync", ids, 5.0),
        told("ssd", ids, 2.5),
        told("off", ids, 6.0, "off on both"),
    ]
    assert verdict(runs) == (
        "ssd: 4.0 × as fast as off on one core, 2.0 × as fast as sync, 2.4 × as fast as off on "
        "both · all 4 texts are equal, token for token"
    )
    assert differing([*runs, told("ssd", ids[:-1], 1.0)])[2] == 10


def drawn(runs: list[Run], width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, record=True, force_terminal=True,
                      color_system=None)  # fmt: skip
    console.print(Columns(console, "A story  (seed 1)", runs)._draw())
    return console.export_text().splitlines()


def test_in_a_terminal_each_has_a_column_of_its_own():
    runs = [told(mode, [101, 102, 103], 1.0) for mode in ("off", "sync", "ssd")]
    runs[1] = Run(Lane("sync"))
    runs[1].state = "waiting …"
    lines = drawn(runs, 90, height=12)
    assert lines[0].startswith("A story  (seed 1)")
    assert all(name in lines[1] for name in ("off", "sync", "ssd"))
    assert lines[3].count("101 102 103") == 2
    assert (lines[-1].count("2.0 tokens/s"), lines[-1].count("waiting …")) == (2, 1)
    assert max(map(len, lines)) <= 90


@pytest.mark.parametrize(("width", "across"), [(40, 1), (60, 2), (120, 4)])
def test_a_narrow_terminal_has_fewer_columns(width, across):
    lines = drawn([told("off", [7, 8], 1.0) for _ in range(4)], width, height=40)
    assert next(line for line in lines if "off" in line).count("off") == across


def test_on_a_cpu_target_and_draft_have_a_core_each(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 6, 7})
    pair, alone = _local_heats(LOCAL)
    assert [lane.name for lane in pair.lanes] == ["off on one core", "sync", "ssd"]
    assert pair.lanes[2].where == "the target on core 4, the draft on core 6"
    assert [lane.where for lane in alone.lanes] == ["the target on both cores"]


@pytest.mark.parametrize("changed", [{"local_device": None}, {"cores": {3}}])
def test_elsewhere_nothing_is_said_of_cores(changed, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: changed.get("cores", {0, 1}))
    (heat,) = _local_heats({**LOCAL, **changed})
    assert [(lane.name, lane.where) for lane in heat.lanes] == [
        ("off", ""), ("sync", ""), ("ssd", "")
    ]  # fmt: skip


def test_a_local_pair_knows_every_mode():
    plan = plan_pair(LOCAL, ("off", "sync", "ssd"), named=False)
    assert plan.draft == "stories-draft"
    flags = " ".join(plan.target_flags)
    assert "--draft-model stories-draft --draft-expand-to hidden=384" in flags
    assert "--expand-to hidden=512 --depth 3" in flags
    assert plan.draft_flags[-2:] == ("--expand-to", "hidden=384")


def test_a_local_race_needs_no_token():
    with pytest.raises(BadInputError, match="neither TLS nor a token"):
        _local_heats({**LOCAL, "security": None})
