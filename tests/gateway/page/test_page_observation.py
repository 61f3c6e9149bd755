"""Timeline and fleet: what they show is what the gateway reports."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.browser import CHROMIUM, ask_and_wait, chunks_in, set_fields
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


def show_scripted_timeline(page: Page) -> Locator:
    """After a real answer; what is drawn is the script's."""
    set_fields(page, max_tokens="2")
    with page.expect_response("**/v1/chat/completions") as caught:
        ask_and_wait(page, "Tell me of a lamb.")
    sequence = chunks_in(caught.value.text())[-1]["metrics"]["ssd"]["sequence"]
    track = {"name": "target 127.0.0.1:1", "role": "target", "events": scripted_events(sequence)}
    page.route("**/ssd/timeline?*", lambda r: r.fulfill(json={"tracks": [track], "problem": ""}))
    page.get_by_role("tab", name="Timeline").click()
    chart = page.locator("#timeline-chart")
    expect(chart.locator("svg")).to_be_visible()
    return chart


def test_the_timeline_of_a_real_request_has_target_and_draft(page: Page) -> None:
    set_fields(page, max_tokens="16")
    page.get_by_role("button", name="Settings").click()
    page.locator("#settings-form [name=speculation]").select_option("ssd")
    page.get_by_role("button", name="Done").click()
    ask_and_wait(page, "Tell me of a lamb.")
    page.get_by_role("tab", name="Timeline").click()
    chart = page.locator("#timeline-chart")
    expect(chart.locator("[data-role=target] rect.forward").first).to_be_visible()
    expect(chart.locator("[data-role=draft] rect").first).to_be_visible()
    expect(page.locator("#timeline-summary")).to_contain_text("rounds")
    page.get_by_text("The same as a table").click()
    expect(page.locator("#timeline-table td").first).to_contain_text("target")


def test_look_ups_have_a_shape_each_and_what_others_had_computed_is_left_out(page: Page) -> None:
    chart = show_scripted_timeline(page)
    for look_up, shape in SHAPES.items():
        expect(chart.locator(f"[data-look-up={look_up}] {shape}")).to_have_count(1)
    expect(chart.locator("rect")).to_have_count(len(SHAPES))
    expect(page.locator("#timeline-summary")).to_contain_text("3 rounds, 1 hit, 1 late, 1 miss")
    page.get_by_text("The same as a table").click()
    expect(page.locator("#timeline-table tbody tr")).to_have_count(2 * len(SHAPES))


def test_zoom_widens_the_picture_and_not_the_page(page: Page) -> None:
    chart = show_scripted_timeline(page)
    widths = "node => [node.clientWidth, node.scrollWidth, document.documentElement.scrollWidth]"
    seen, whole, around = chart.evaluate(widths)
    assert whole <= seen
    chart.focus()
    page.keyboard.press("+")
    assert chart.evaluate(widths)[0] == seen
    assert chart.evaluate(widths)[1] > 1.4 * seen
    assert chart.evaluate(widths)[2] == around
    page.get_by_role("button", name="Fit").click()
    assert chart.evaluate(widths)[1] <= seen


def test_a_timeline_that_is_not_there_says_why(page: Page) -> None:
    page.get_by_role("tab", name="Timeline").click()
    expect(page.locator("#timeline-problem")).to_contain_text("Send a message or run a race first")


def test_the_fleet_shows_targets_and_links(page: Page) -> None:
    with page.expect_response("**/ssd/fleet") as caught:
        page.get_by_role("tab", name="Fleet").click()
    (target,) = caught.value.json()["targets"]
    card = page.locator(".target")
    expect(card.get_by_role("heading")).to_have_text(target["address"])
    expect(card.locator("header .state")).to_have_text("ready")
    expect(card).to_contain_text(target["model"])
    expect(card.locator(".figures")).to_contain_text(f"of {target['num_kv_blocks']}")
    (link,) = target["endpoints"]
    row = card.locator("tbody tr")
    expect(row.locator("td").first).to_have_text(link["address"])
    expect(row.locator(".state")).to_have_text("up")
    expect(row).to_contain_text("stories-draft")


def test_the_fleet_is_asked_again_only_while_it_is_looked_at(page: Page) -> None:
    page.clock.install()
    page.reload()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("tab", name="Fleet").click()
    expect(page.locator("#fleet-updated")).to_contain_text("updated")
    with page.expect_response("**/ssd/fleet"):
        page.clock.run_for(2500)
    page.get_by_role("tab", name="Race").click()
    page.clock.run_for(2500)
    seen = len(asked)
    page.clock.run_for(10_000)
    assert len(asked) == seen


def test_what_is_not_there_is_said(page: Page) -> None:
    lost = {"address": "127.0.0.1:1", "ready": False, "problem": "connection refused"}
    fleet = {"targets": [{**lost, "endpoints": []}]}
    page.route("**/ssd/fleet", lambda route: route.fulfill(json=fleet))
    page.get_by_role("tab", name="Fleet").click()
    card = page.locator(".target")
    expect(card.locator(".state")).to_have_text("not ready")
    expect(card.locator(".problem")).to_have_text("connection refused")
    page.unroute("**/ssd/fleet")
    page.route("**/ssd/fleet", lambda route: route.abort())
    expect(page.locator("#fleet-problem")).to_contain_text("cannot be reached")


def test_the_fleet_says_how_rows_travel_to_a_draft(page: Page) -> None:
    link = {"address": "127.0.0.1:2", "state": "up", "draft_name": "eagle", "payoff": "on"}
    planes = [
        {"stream": "features", "kind": "nccl", "state": "up"},
        {"stream": "draft_distributions", "kind": "<b>tcp</b>", "state": "broken"},
    ]
    target = {"address": "127.0.0.1:1", "ready": False, "problem": ""}
    fleet = {"targets": [{**target, "endpoints": [{**link, "planes": planes}, link]}]}
    page.route("**/ssd/fleet", lambda route: route.fulfill(json=fleet))
    page.get_by_role("tab", name="Fleet").click()
    cells = page.locator(".target tbody td[data-name=Planes]")
    expect(cells.first).to_have_text("features by nccl, draft_distributions by <b>tcp</b> (broken)")
    expect(cells.last).to_have_text("–")
