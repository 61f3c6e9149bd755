"""Metrics of running services, and what is made of them: the dashboard and the alerts."""

import json
import re
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ssd_serving.rpc.speculator_kinds import KINDS
from ssd_target.links.link_state import DraftLinkState
from ssd_target.records.speculation_stats import FALLBACKS, LookUp
from tests.deploy.watched import Bereft, Pair
from tests.processes import wait_until_idle
from tests.suite.tools import needs_tool

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
PAGE = FOLDER.parents[1] / "docs/observability.md"
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
RULES = {rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]}
PANELS = json.loads((FOLDER / "grafana-dashboard.json").read_text())
QUERIES = [
    target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
    for panel in PANELS["panels"]
    for target in panel.get("targets", ())
]
PLACES = ("inside", "endpoint")
DEPTH = 5  # of a target, by default
# Labels that a series may have, and how many values each may take.
LABELS = {
    **{"le": 20, "position": 64, "reason": 32, "state": 8, "outcome": 8, "result": 12},
    **{"source": 8, "mode": 3, "role": 1, "how": 16, "what": 4, "limit": 4, "bound": 4, "field": 4},
    **{"method": 10, "status": 16, "kind": 8, "place": 2, "stream": 2, "task": 8},
}
MOST_SERIES = 300  # of one service
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NOT_SHOWN = {
    "ssd_draft_links_ended_total",
    "ssd_draft_frames_received_total",
    "ssd_draft_frames_sent_total",
    "ssd_draft_engine_frames_dropped_total",
}
EMPTY_YET = {"reason"}  # of failures that have not happened

Series = dict[str, dict[tuple[tuple[str, str], ...], float]]
Exported = tuple[Series, Series, Series]


def parsed(exposition: str) -> Series:
    """Values by sample and labels; a family without samples is there, too."""
    series: Series = defaultdict(dict)
    for family in text_string_to_metric_families(exposition):
        series |= {family.name + suffix: {} for suffix in SUFFIXES[family.type]}
        for sample in family.samples:
            series[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return dict(series)


def by_label(series: Series, name: str) -> dict[str, float]:
    """Of a metric with one label."""
    return {labels[0][1]: value for labels, value in series[name].items()}


def ones(series: Series, *names: str) -> list[float]:
    """Of metrics without labels."""
    return [series[name][()] for name in names]


@pytest.fixture(scope="module")
def exported(watched: Pair) -> Exported:
    """Of the target, of its draft and of the gateway, after some requests."""
    for number in range(3):
        watched.generate(request_id=f"request-{number}")
    watched.complete()
    wait_until_idle(watched.target)
    return all_series(watched)


def all_series(pair: Pair) -> Exported:
    assert pair.gateway is not None
    with urllib.request.urlopen(f"{pair.gateway.url}/metrics", timeout=60) as answer:
        gateway = answer.read().decode()
    return parsed(pair.target.exposition()), parsed(pair.draft.exposition()), parsed(gateway)


def test_the_names_of_the_field_are_there_and_count(exported: Exported) -> None:
    stem = "ssd_spec_decode_num_"
    drafts, drafted, accepted = ones(
        exported[0],
        *(f"{stem}{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")),
    )
    assert 0 < drafts <= sum(by_label(exported[0], "ssd_rounds_total").values())
    assert 0 < accepted <= drafted
    positions = by_label(exported[0], "ssd_spec_decode_accepted_tokens_per_pos_total")
    assert list(positions) == [str(position) for position in range(DEPTH)]
    assert list(positions.values()) == sorted(positions.values(), reverse=True)
    assert sum(positions.values()) == accepted


def test_every_label_is_shown_from_the_start(exported: Exported) -> None:
    target, draft, _ = exported
    assert by_label(target, "ssd_cache_lookups_total").keys() == {each.value for each in LookUp}
    assert by_label(target, "ssd_fallback_rounds_total").keys() == set(FALLBACKS)
    states = {each.value: each is DraftLinkState.UP for each in DraftLinkState}
    assert by_label(target, "ssd_link_state") == states
    roles = [by_label(series, "ssd_ready") for series in exported]
    assert roles == [{"target": 1}, {"draft": 1}, {"gateway": 1}]
    drafts = {tuple(dict(at).values()): n for at, n in target["ssd_drafts"].items()}
    at = [(kind, place) for kind in KINDS for place in PLACES]
    assert drafts == {each: each == ("model", "endpoint") for each in at}
    assert by_label(draft, "ssd_draft_info") == {kind: kind == "model" for kind in KINDS}
    assert ones(target, "ssd_sequences_active") == ones(draft, "ssd_sequences_active") == [0]


def test_a_gateway_counts_what_it_passes_on(exported: Exported) -> None:
    _, _, gateway = exported
    assert gateway["ssd_gateway_requests_total"] == {(("reason", "served"), ("status", "200")): 1}
    counts = {"tokens_total": 8, "targets": 1, "targets_ready": 1, "running": 0, "moves_total": 0}
    counts |= {"first_token_seconds_count": 1, "request_seconds_count": 1}
    assert ones(gateway, *(f"ssd_gateway_{name}" for name in counts)) == list(counts.values())


def test_waits_and_builds_are_histograms(exported: Exported) -> None:
    target, draft, _ = exported
    waits = by_label(target, "ssd_round_wait_seconds_bucket")
    count, total = ones(target, "ssd_round_wait_seconds_count", "ssd_round_wait_seconds_sum")
    assert count == waits["+Inf"] == sum(by_label(target, "ssd_rounds_total").values())
    assert list(waits.values()) == sorted(waits.values())
    assert (total > 0) == (count > waits["0.0"])
    builds = by_label(draft, "ssd_draft_build_seconds_bucket")
    count, total = ones(draft, "ssd_draft_build_seconds_count", "ssd_draft_build_seconds_sum")
    assert 0 < count == builds["+Inf"]
    assert total > 0


def test_series_are_few_and_do_not_grow_with_requests(watched: Pair, exported: Exported) -> None:
    def names(series: Series) -> set[Any]:
        return {(name, labels) for name, found in series.items() for labels in found}

    for series in exported:
        assert 0 < len(names(series)) <= MOST_SERIES
        pairs = {pair for _, labels in names(series) for pair in labels}
        used = [label for label, _ in pairs]
        assert {
            label: used.count(label) for label in used if used.count(label) > LABELS[label]
        } == {}
    watched.generate("Another prompt", request_id="another-id", max_tokens=9)
    wait_until_idle(watched.target)
    watched.complete(9)
    assert list(map(names, all_series(watched))) == list(map(names, exported))


# What is made of them


def asked(expression: str) -> tuple[list[promql.VectorSelector], set[str]]:
    """The series that an expression selects, and the labels that it groups by."""
    selectors: list[promql.VectorSelector] = []
    labels: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql.MatrixSelector | promql.VectorSelector):
            selectors.append(getattr(node, "vector_selector", node))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        return True

    promql.walk(promql.parse(expression), visit)
    return selectors, labels


def missing(expression: str, exported: Exported) -> set[str]:
    """Of every metric, every label, and every value of it that is named, what no service has."""
    selectors, labels = asked(expression)
    assert selectors, expression
    found = set()
    for selector in selectors:
        own = [series[selector.name] for series in exported if selector.name in series]
        pairs = {pair for samples in own for at in samples for pair in at}
        named = {(m.name, m.value) for m in selector.matchers.matchers if m.name != "instance"}
        labels -= {label for label, _ in pairs}
        found |= {f"{selector.name}: {pair}" for pair in named - pairs}
        if not own:
            found.add(selector.name)
    return found | (labels - {"instance"} - EMPTY_YET)


def test_what_alerts_and_the_dashboard_ask_for_exists(exported: Exported) -> None:
    assert len(QUERIES) > 40
    wrong = {each: missing(each, exported) for each in (*QUERIES, *RULES.values())}
    assert {each: lacks for each, lacks in wrong.items() if lacks} == {}


def test_the_dashboard_can_be_imported_anywhere() -> None:
    variables = {each["name"]: each["type"] for each in PANELS["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    panels = PANELS["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert len(panels) - len(shown) == 7
    assert {panel["datasource"]["uid"] for panel in shown} == {"${datasource}"}
    assert all(panel["targets"] for panel in shown)


def stems(names: Iterable[str]) -> set[str]:
    """Of a histogram's parts, its own name."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in names}


def test_the_dashboard_and_the_page_tell_of_all_that_is_exported(exported: Exported) -> None:
    names = stems(name for series in exported for name in series)
    shown = stems(selector.name for query in QUERIES for selector in asked(query)[0])
    assert names <= shown | NOT_SHOWN
    assert set(re.findall(r"`(ssd_\w+)", PAGE.read_text())) == names
    assert set(re.findall(r"`(SSD\w+)`", PAGE.read_text())) == RULES.keys()


# Alerts fire


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_tool("promtool")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    promtool("test", "rules", "alerts.test.yaml")


def test_every_alert_is_seen_firing() -> None:
    text = (FOLDER / "alerts.test.yaml").read_text()
    assert set(re.findall('alertname="(\\w+)"', text)) >= RULES.keys()


def holds(alert: str, scrapes: list[dict[str, float]], expected: bool) -> dict[str, Any]:
    """As promtool asks whether an alert's condition is true at the second of two scrapes."""
    (pair,) = pairwise(scrapes)
    values = {name: " ".join(str(each.get(name, "_")) for each in pair) for name in pair[1]}
    question = {
        "expr": f"(count({RULES[alert]}) or vector(0)) > bool 0",
        "eval_time": "1m",
        "exp_samples": [{"labels": "{}", "value": int(expected)}],
    }
    series = [{"series": name, "values": said} for name, said in values.items()]
    return {"interval": "1m", "input_series": series, "promql_expr_test": [question]}


@needs_tool("promtool")
def test_a_draft_that_is_killed_raises_alarms(bereft: Bereft, tmp_path: Path) -> None:
    tests = [
        holds(alert, scrapes, scrapes is bereft.without)
        for alert in ("SSDDraftUnreachable", "SSDSpeculationFallsBack")
        for scrapes in (bereft.with_draft, bereft.without)
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def test_rounds_without_a_link_are_counted_as_such(bereft: Bereft) -> None:
    before, after = bereft.without
    look_ups, fell = (
        f'ssd_{what}_total{{{label}="disconnected"}}'
        for what, label in (("cache_lookups", "result"), ("fallback_rounds", "reason"))
    )
    assert 0 < after[look_ups] - before[look_ups] <= after[fell]
    assert bereft.orphan.tokens == bereft.output.tokens
