"""The race: three modes side by side, called equal only when they were compared and are."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, Route, expect

from tests.gateway.page.browser import CHROMIUM, said, tokens_shown
from tests.suite.scale import full_only
from tests.suite.tools import needs_tool

pytestmark = needs_tool("Chromium", *CHROMIUM)
MODES = ("off", "sync", "ssd")
REFUSED = {"error": {"message": "speculation.mode: sync is not served", "param": "speculation"}}


def start(page: Page, **fields: str) -> None:
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
    start(page, tokens="24")
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


def test_texts_that_differ_are_not_called_equal(page: Page) -> None:
    same, other = said("a", "b", "c", ids=[1, 2, 3]), said("a", "b", "c", ids=[1, 9, 3])
    script_modes(page, off=same, sync=same, ssd=other)
    start(page)
    expect(page.locator("#race-verdict")).to_have_text("texts differ at token 2")


def test_a_longer_text_is_another_text(page: Page) -> None:
    short, long = said("a", ids=[1]), said("a", "b", ids=[1, 2])
    script_modes(page, off=short, sync=short, ssd=long)
    start(page)
    expect(page.locator("#race-verdict")).to_have_text("texts differ at token 2")


def test_a_mode_that_is_not_served_is_shown_with_its_error(page: Page) -> None:
    text = said("a", ids=[1])
    script_modes(page, off=text, ssd=text)
    start(page)
    lane = page.locator(".lane[data-mode=sync]")
    expect(lane.get_by_role("alert")).to_have_text(REFUSED["error"]["message"])
    expect(page.locator("#race-verdict")).to_have_text("Not compared: sync did not finish.")


@pytest.mark.parametrize(
    "broken", [said("a", ids=[1], finish=None), said("a", ids=[1]).replace("data: [DONE]\n\n", "")]
)
def test_texts_that_did_not_end_are_not_compared(page: Page, broken: str) -> None:
    text = said("a", ids=[1])
    script_modes(page, off=text, sync=text, ssd=broken)
    start(page)
    expect(page.locator("#race-verdict")).to_have_text("Not compared: ssd did not finish.")


def test_texts_without_token_ids_are_not_compared(page: Page) -> None:
    script_modes(page, off=said("a"), sync=said("a"), ssd=said("a"))
    start(page)
    expect(page.locator("#race-verdict")).to_contain_text("Not compared: the server did not give")
