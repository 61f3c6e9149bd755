"""Race, timeline and fleet: what they show is what the gateway reports; texts are called equal only
when they were compared and are."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.gateway.page.browser import (
    CHROMIUM,
    DONE,
    ask_and_wait,
    chunks_in,
    said,
    set_fields,
    tokens_shown,
)
from tests.suite.scale import full_only
from tests.suite.tools import needs_tool

pytestmark = needs_tool("Chromium", *CHROMIUM)
SHAPES = {"hit": "circle.hit", "late": "path.late", "miss_token": "path.miss"}


def scripted_events(sequence: int) -> list[dict[str, Any]]:
    """A forward and a round for each kind of look-up; then another request's forward."""
    same = {"rows": 1, "tokens": 3, "accepted": 2, "origin": "cache", "look_up": ""}
    events = []
    for i, look_up in enumerate(SHAPES):
        of_round = {"sequence": sequence, "begin_ms": 10.0 * i, "duration_ms": 9.0, "round": i + 1}
        events.append({**same, "kind": "forward", **of_round})
        events.append({**same, "kind": "round", **of_round, "look_up": look_up})
    other = {"sequence": 0, "begin_ms": 500.0, "duration_ms": 9.0, "round": 0}
    return [*events, {**same, "kind": "forward", **other}]


def test_the_timeline_of_a_real_request_has_target_and_draft(page: Page) -> None:
    page.get_by_role("tab", name="Timeline").click()
    expect(page.locator("#timeline-problem")).to_contain_text("Send a message or run a race first")
    page.get_by_role("tab", name="Chat").click()
    set_fields(page, max_tokens="16")
    page.get_by_role("button", name="Settings").click()
    page.locator("#settings-form [name=speculation]").select_option("ssd")
    page.get_by_role("button", name="Done").click()
    with page.expect_response("**/v1/chat/completions") as caught:
        ask_and_wait(page, "Tell me of a lamb.")
    page.get_by_role("tab", name="Timeline").click()
    chart = page.locator("#timeline-chart")
    expect(chart.locator("[data-role=target] rect.forward").first).to_be_visible()
    expect(chart.locator("[data-role=draft] rect").first).to_be_visible()
    sequence = chunks_in(caught.value.text())[-1]["metrics"]["ssd"]["sequence"]
    check_what_is_drawn(page, sequence)


def check_what_is_drawn(page: Page, sequence: int) -> None:
    """Look-ups by their shapes, and nothing that is not the request's; zoom widens the chart, and
    not the page."""
    track = {"name": "target 127.0.0.1:1", "role": "target", "events": scripted_events(sequence)}
    page.route("**/ssd/timeline?*", lambda r: r.fulfill(json={"tracks": [track], "problem": ""}))
    page.locator("#timeline-reload").click()
    chart = page.locator("#timeline-chart")
    for look_up, shape in SHAPES.items():
        expect(chart.locator(f"[data-look-up={look_up}] {shape}")).to_have_count(1)
    expect(chart.locator("rect")).to_have_count(len(SHAPES))
    expect(page.locator("#timeline-summary")).to_contain_text("3 rounds, 1 hit, 1 late, 1 miss")
    page.get_by_text("The same as a table").click()
    expect(page.locator("#timeline-table tbody tr")).to_have_count(2 * len(SHAPES))
    widths = "node => [node.clientWidth, node.scrollWidth, document.documentElement.scrollWidth]"
    seen, whole, around = chart.evaluate(widths)
    assert whole <= seen
    chart.focus()
    page.keyboard.press("+")
    seen_zoomed, whole, around_zoomed = chart.evaluate(widths)
    assert (seen_zoomed, around_zoomed) == (seen, around)
    assert whole > 1.4 * seen
    page.get_by_role("button", name="Fit").click()
    assert chart.evaluate(widths)[1] <= seen


def test_the_fleet_shows_targets_and_links_and_is_asked_again_while_it_is_looked_at(
    page: Page,
) -> None:
    page.clock.install()
    page.reload()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with page.expect_response("**/ssd/fleet") as caught:
        page.get_by_role("tab", name="Fleet").click()
    (target,) = caught.value.json()["targets"]
    (link,) = target["endpoints"]
    for place, text in {
        "header .state": "ready",
        ".figures": f"of {target['num_kv_blocks']}",
        "": target["model"],
        "header": target["address"],
        "tbody td >> nth=0": link["address"],
        "tbody .state": "up",
        "tbody tr": "stories-draft",
    }.items():
        expect(page.locator(f".target {place}")).to_contain_text(text)
    with page.expect_response("**/ssd/fleet"):
        page.clock.run_for(2500)
    page.get_by_role("tab", name="Race").click()
    page.clock.run_for(2500)
    seen = len(asked)
    page.clock.run_for(10_000)
    assert len(asked) == seen


def test_the_fleet_says_what_is_not_there_and_how_rows_travel_to_a_draft(page: Page) -> None:
    link = {"address": "127.0.0.1:2", "state": "up", "draft_name": "eagle", "payoff": "on"}
    planes = [
        {"stream": "features", "kind": "nccl", "state": "up"},
        {"stream": "draft_distributions", "kind": "<b>tcp</b>", "state": "broken"},
    ]
    lost = {"address": "127.0.0.1:1", "ready": False, "problem": "connection refused"}
    fleet = {"targets": [{**lost, "endpoints": [{**link, "planes": planes}, link]}]}
    page.route("**/ssd/fleet", lambda route: route.fulfill(json=fleet))
    page.get_by_role("tab", name="Fleet").click()
    card = page.locator(".target")
    expect(card.locator("header .state")).to_have_text("not ready")
    expect(card.locator(".problem")).to_have_text("connection refused")
    cells = card.locator("tbody td[data-name=Planes]")
    told = "features by nccl, draft_distributions by <b>tcp</b> (broken)"
    expect(cells).to_have_text([told, "–"])
    page.unroute("**/ssd/fleet")
    page.route("**/ssd/fleet", lambda route: route.abort())
    expect(page.locator("#fleet-problem")).to_contain_text("cannot be reached")


# Race

MODES = ("off", "sync", "ssd")
REFUSED = {"error": {"message": "speculation.mode: sync is not served", "param": "speculation"}}


def start_race(page: Page, **fields: str) -> None:
    page.get_by_role("tab", name="Race").click()
    for name, value in fields.items():
        page.locator(f"#race-{name}").fill(value)
    page.get_by_role("button", name="Start").click()


def script_modes(page: Page, **answers: str) -> None:
    """Each mode's answer; a mode without one is refused."""

    def answer(route: Route) -> None:
        mode = json.loads(route.request.post_data or "")["speculation"]["mode"]
        if mode in answers:
            route.fulfill(content_type="text/event-stream", body=answers[mode])
        else:
            route.fulfill(status=400, json=REFUSED)

    page.route("**/v1/chat/completions", answer)


@pytest.mark.parametrize("order", ["turns", full_only("together")])
def test_three_columns_and_equal_texts(page: Page, order: str) -> None:
    page.get_by_role("tab", name="Race").click()
    page.locator("#race-order").select_option(order)
    start_race(page, tokens="24")
    expect(page.locator("#race-verdict")).to_have_text("equal texts")
    lanes = page.locator(".lane")
    assert [lanes.nth(i).get_attribute("data-mode") for i in range(3)] == list(MODES)
    texts = ["".join(text for text, _ in tokens_shown(lanes.nth(i))) for i in range(3)]
    assert texts[0]
    assert texts == [texts[0]] * 3
    expect(lanes.first.locator(".ratio")).to_have_text("1.00× off")
    expect(lanes.last.locator(".ratio")).to_contain_text("× off")
    assert {origin for _, origin in tokens_shown(lanes.first)} == {"target"}
    assert page.locator("#race-seed").input_value().isdigit()  # made up, and shown


SAME, OTHER = said("a", "b", ids=[1, 2]), said("a", "b", ids=[1, 9])
ONE = said("a", ids=[1])
VERDICTS = [
    ({"off": SAME, "sync": SAME, "ssd": OTHER}, "texts differ at token 2"),
    ({"off": ONE, "sync": ONE, "ssd": SAME}, "texts differ at token 2"),
    ({"off": ONE, "ssd": ONE}, "Not compared: sync did not finish."),
    (
        {"off": ONE, "sync": ONE, "ssd": said("a", ids=[1], finish=None)},
        "Not compared: ssd did not finish.",
    ),
    ({"off": ONE, "sync": ONE, "ssd": ONE.replace(DONE, "")}, "Not compared: ssd did not finish."),
    (dict.fromkeys(MODES, said("a")), "Not compared: the server did not give"),
]


def test_only_texts_that_were_compared_and_are_equal_are_called_so(page: Page) -> None:
    for answers, verdict in VERDICTS:
        script_modes(page, **answers)
        start_race(page)
        expect(page.locator("#race-verdict")).to_contain_text(verdict)
        if "sync" not in answers:
            alert = page.locator(".lane[data-mode=sync]").get_by_role("alert")
            expect(alert).to_have_text(REFUSED["error"]["message"])
        page.reload()
