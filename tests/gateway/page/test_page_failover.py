"""An answer in the browser goes on when its target dies, and not a token of it is another."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.gateway.page.browser import (
    CHROMIUM,
    PATIENCE_MS,
    ask_and_wait,
    set_fields,
    show_origins,
    tokens_shown,
)
from tests.processes import gateway as start_gateway
from tests.processes import target
from tests.suite.tools import needs_tool

if TYPE_CHECKING:
    from tests.processes import GatewayProcess, TargetProcess

pytestmark = [needs_tool("Chromium", *CHROMIUM), pytest.mark.full]

KILL_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".answer .body")?.textContent) return;
  observer.disconnect();
  window.killTarget();
}).observe(document.getElementById("messages"), {subtree: true, childList: true})"""


@pytest.fixture
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, list[TargetProcess]]]:
    folder = tmp_path_factory.mktemp("fleet")
    with target(folder / "one") as one, target(folder / "two") as two:
        addresses = [one.address, two.address]
        with start_gateway(folder / "gateway", targets=addresses) as gateway:
            yield gateway, [one, two]


def go_on_past_the_end(route: Route) -> None:
    """The answer is as long as it may be, so that the target dies before it is complete."""
    body = json.loads(route.request.post_data or "")
    route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))


def kill_the_busy_one(gateway: GatewayProcess, targets: list[TargetProcess]) -> None:
    with urllib.request.urlopen(gateway.url + "/ssd/fleet", timeout=60) as answer:
        busy = {each["address"] for each in json.load(answer)["targets"] if each["in_flight"]}
    (found,) = [each for each in targets if each.address in busy]
    found.process.kill()


def open_page(browser: Browser, gateway: GatewayProcess) -> Page:
    context = browser.new_context(base_url=gateway.url)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto("/")
    page.locator("#settings-form [name=model] option").first.wait_for(state="attached")
    return page


def test_a_target_killed_in_mid_answer_changes_nothing_of_its_text(
    browser: Browser, fleet: tuple[GatewayProcess, list[TargetProcess]]
) -> None:
    gateway, targets = fleet
    page = open_page(browser, gateway)
    page.route("**/v1/chat/completions", go_on_past_the_end)
    page.expose_function("killTarget", lambda: kill_the_busy_one(gateway, targets))
    set_fields(page, seed="7", max_tokens="800")
    show_origins(page)
    page.evaluate(KILL_AT_FIRST_TEXT)
    answer = ask_and_wait(page, "Tell me of a lamb.")
    expect(answer.locator(".facts")).to_contain_text("moved to another target 1×")
    disturbed = tokens_shown(answer)
    page.get_by_role("button", name="New conversation").click()
    undisturbed = tokens_shown(ask_and_wait(page, "Tell me of a lamb."))
    assert len(disturbed) == 800
    assert "".join(text for text, _ in disturbed) == "".join(text for text, _ in undisturbed)
    page.context.close()
