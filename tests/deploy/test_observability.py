"""Metrics of running services, and what is made of them: the dashboard and the alerts."""

import json
import re
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ssd_serving.rpc.speculator_kinds import KINDS
from ssd_target.links.link_state import DraftLinkState
from ssd_target.records.speculation_stats import FALLBACKS, LookUp
from tests.deploy.promql import Samples, evaluate, expand, firing, parse_series
from tests.deploy.watched import Bereft, Pair
from tests.processes import wait_until_idle
from tests.suite.tools import needs_tool

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
PAGE = FOLDER.parents[1] / "docs/observability.md"
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
UNIT_TESTS = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
PLACES = ("inside", "endpoint")
DEPTH = 5  # of a target, by default
# Labels that a series may have, and how many values each may take.
LABELS = {"le": 20, "position": 64, "reason": 32, "state": 8, "outcome": 8, "result": 12}
LABELS |= {
    "source": 8,
    "mode": 3,
    "role": 1,
    "how": 16,
    "what": 4,
    "limit": 4,
    "bound": 4,
    "field": 4,
    "method": 10,
    "status": 16,
    "kind": 8,
    "place": 2,
    "stream": 2,
    "task": 8,
}
MOST_SERIES = 300  # of one service
STEP = 60.0

Series = dict[str, dict[tuple[tuple[str, str], ...], float]]
Exported = tuple[Series, Series, Series]


def parsed(exposition: str) -> Series:
    """Values by sample and labels; a family without samples is there, too."""
    series: Series = defaultdict(dict)
    for family in text_string_to_metric_families(exposition):
        for suffix in SUFFIXES[family.type]:
            series[family.name + suffix] = {}
        for sample in family.samples:
            series[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return dict(series)


SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def by_label(series: Series, name: str) -> dict[str, float]:
    """Of a metric with one label."""
    return {labels[0][1]: value for labels, value in series[name].items()}


def one(series: Series, name: str) -> float:
    return series[name][()]


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
    target, _, _ = exported
    stem = "ssd_spec_decode_"
    assert (
        0
        < one(target, f"{stem}num_drafts_total")
        <= sum(by_label(target, "ssd_rounds_total").values())
    )
    drafted, accepted = (
        one(target, f"{stem}num_{what}_tokens_total") for what in ("draft", "accepted")
    )
    assert 0 < accepted <= drafted
    positions = by_label(target, f"{stem}accepted_tokens_per_pos_total")
    assert list(positions) == [str(position) for position in range(DEPTH)]
    assert list(positions.values()) == sorted(positions.values(), reverse=True)
    assert sum(positions.values()) == accepted


def test_every_label_is_shown_from_the_start(exported: Exported) -> None:
    target, draft, gateway = exported
    assert by_label(target, "ssd_cache_lookups_total").keys() == {each.value for each in LookUp}
    assert by_label(target, "ssd_fallback_rounds_total").keys() == set(FALLBACKS)
    assert by_label(target, "ssd_link_state").keys() == {each.value for each in DraftLinkState}
    assert by_label(target, "ssd_link_state")["up"] == 1
    assert by_label(target, "ssd_ready") == {"target": 1}
    assert by_label(draft, "ssd_ready") == {"draft": 1}
    assert by_label(gateway, "ssd_ready") == {"gateway": 1}
    drafts = {tuple(dict(at).values()): n for at, n in target["ssd_drafts"].items()}
    assert drafts.keys() == {(kind, place) for kind in KINDS for place in PLACES}
    assert {at: count for at, count in drafts.items() if count} == {("model", "endpoint"): 1}
    assert by_label(draft, "ssd_draft_info") == {kind: kind == "model" for kind in KINDS}
    assert one(target, "ssd_sequences_active") == one(draft, "ssd_sequences_active") == 0


def test_a_gateway_counts_what_it_passes_on(exported: Exported) -> None:
    _, _, gateway = exported
    assert gateway["ssd_gateway_requests_total"] == {(("reason", "served"), ("status", "200")): 1}
    assert one(gateway, "ssd_gateway_tokens_total") == 8
    assert one(gateway, "ssd_gateway_targets") == one(gateway, "ssd_gateway_targets_ready") == 1
    assert one(gateway, "ssd_gateway_running") == one(gateway, "ssd_gateway_moves_total") == 0
    for name in ("ssd_gateway_first_token_seconds", "ssd_gateway_request_seconds"):
        assert one(gateway, f"{name}_count") == 1


def test_waits_and_builds_are_histograms(exported: Exported) -> None:
    target, draft, _ = exported
    rounds = sum(by_label(target, "ssd_rounds_total").values())
    waits = by_label(target, "ssd_round_wait_seconds_bucket")
    assert one(target, "ssd_round_wait_seconds_count") == waits["+Inf"] == rounds
    assert list(waits.values()) == sorted(waits.values())
    waited = rounds - waits["0.0"]
    assert (one(target, "ssd_round_wait_seconds_sum") > 0) == (waited > 0)
    builds = by_label(draft, "ssd_draft_build_seconds_bucket")
    assert 0 < one(draft, "ssd_draft_build_seconds_count") == builds["+Inf"]
    assert one(draft, "ssd_draft_build_seconds_sum") > 0


def test_series_are_few_and_do_not_grow_with_requests(watched: Pair, exported: Exported) -> None:
    def names(series: Series) -> set[Any]:
        return {(name, labels) for name, found in series.items() for labels in found}

    for series in exported:
        assert 0 < len(names(series)) <= MOST_SERIES
        values = defaultdict(set)
        for _, labels in names(series):
            for label, value in labels:
                values[label].add(value)
        assert values.keys() <= LABELS.keys()
        assert all(len(found) <= LABELS[label] for label, found in values.items())
    watched.generate("Another prompt", request_id="another-id", max_tokens=9)
    wait_until_idle(watched.target)
    watched.complete(9)
    later = all_series(watched)
    assert list(map(names, later)) == list(map(names, exported))


# What is made of them


def dashboard_queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def selectors(expression: str) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql.VectorSelector):
            found.append(node)
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def grouped_by(expression: str) -> set[str]:
    labels: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        return True

    promql.walk(promql.parse(expression), visit)
    return labels


def check_exists(expression: str, exported: Iterable[Series]) -> None:
    """Every metric, every label, and every value of it that is named, in one of the services."""
    known: set[str] = {"instance"}
    used = selectors(expression)
    assert used, expression
    for selector in used:
        found = [labels for series in exported for labels in series.get(selector.name, ())]
        assert any(selector.name in series for series in exported), selector.name
        known |= {name for labels in found for name, _ in labels}
        for matcher in selector.matchers.matchers:
            if matcher.name != "instance":
                pairs = {pair for labels in found for pair in labels}
                assert (matcher.name, matcher.value) in pairs, (selector.name, matcher.name)
    assert grouped_by(expression) <= known | EMPTY_YET, expression


EMPTY_YET = {"reason"}  # of failures that have not happened


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_what_an_alert_asks_for_exists(rule: dict[str, Any], exported: Exported) -> None:
    check_exists(rule["expr"], exported)


def test_what_the_dashboard_asks_for_exists(exported: Exported) -> None:
    queries = list(dashboard_queries())
    assert len(queries) > 40
    for query in queries:
        check_exists(query, exported)


def test_the_dashboard_can_be_imported_anywhere() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert len(rows) == 7
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]


def stem(name: str) -> str:
    """Of a histogram's parts, its own name."""
    return name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")


def test_the_dashboard_shows_all_that_is_exported(exported: Exported) -> None:
    shown = {selector.name for query in dashboard_queries() for selector in selectors(query)}
    stems = set(map(stem, shown)) | NOT_SHOWN
    for series in exported:
        assert {stem(name) for name in series} <= stems


NOT_SHOWN = {
    "ssd_draft_links_ended_total",
    "ssd_draft_frames_received_total",
    "ssd_draft_frames_sent_total",
    "ssd_draft_engine_frames_dropped_total",
}


def test_the_page_tells_of_all_of_it(exported: Exported) -> None:
    page = PAGE.read_text()
    said = set(re.findall(r"`(ssd_\w+)", page))
    assert said == {stem(name) for series in exported for name in series}
    assert set(re.findall(r"`(SSD\w+)`", page)) == {rule["alert"] for rule in RULES}


# Alerts fire


@pytest.mark.parametrize("number", range(len(UNIT_TESTS["tests"])))
def test_alerts_fire_when_they_should_and_only_then(number: int) -> None:
    """What promtool checks, without it."""
    unit, samples = UNIT_TESTS["tests"][number], Samples()
    for series in unit["input_series"]:
        name, labels = parse_series(series["series"])
        for minute, value in enumerate(expand(series["values"])):
            if value is not None:
                samples.add(name, labels, minute * STEP, value)
    (asked,) = unit["promql_expr_test"]
    expected = {parse_series(each["labels"])[1]["alertname"] for each in asked["exp_samples"]}
    at = float(asked["eval_time"].removesuffix("m")) * STEP
    assert firing(RULES, samples, at, STEP) == expected


def test_every_alert_is_seen_firing() -> None:
    text = (FOLDER / "alerts.test.yaml").read_text()
    for rule in RULES:
        assert f'alertname="{rule["alert"]}"' in text


@needs_tool("promtool")
def test_prometheus_agrees() -> None:
    check = ["promtool", "check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml"]
    subprocess.run(check, cwd=FOLDER, check=True, timeout=60, capture_output=True)
    run = ["promtool", "test", "rules", "alerts.test.yaml"]
    done = subprocess.run(run, cwd=FOLDER, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def scraped(expositions: Iterable[tuple[float, str]]) -> Samples:
    samples = Samples()
    for at, text in expositions:
        for name, found in parsed(text).items():
            for labels, value in found.items():
                samples.add(name, {**dict(labels), "instance": "t"}, at, value)
    return samples


def holds(alert: str, expositions: list[tuple[float, str]]) -> bool:
    """Whether its condition is true at the last of these scrapes."""
    (rule,) = (rule for rule in RULES if rule["alert"] == alert)
    return bool(evaluate(rule["expr"], scraped(expositions), expositions[-1][0]))


@pytest.mark.parametrize("alert", ["SSDDraftUnreachable", "SSDSpeculationFallsBack"])
def test_a_draft_that_is_killed_raises_an_alarm(bereft: Bereft, alert: str) -> None:
    assert not holds(alert, bereft.with_draft)
    assert holds(alert, bereft.without)


def test_rounds_without_a_link_are_counted_as_such(bereft: Bereft) -> None:
    before, after = (parsed(text) for _, text in bereft.without)
    look_ups = "ssd_cache_lookups_total"
    rise = by_label(after, look_ups)["disconnected"] - by_label(before, look_ups)["disconnected"]
    fell = by_label(after, "ssd_fallback_rounds_total")["disconnected"]
    assert 0 < rise <= fell
    assert bereft.orphan is not None
    assert bereft.output is not None
    assert bereft.orphan.tokens == bereft.output.tokens
