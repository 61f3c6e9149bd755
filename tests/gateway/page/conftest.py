"""A browser, and the page of a real gateway in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.gateway.page.browser import CHROMIUM, PATIENCE_MS
from tests.suite.tools import tool

if TYPE_CHECKING:
    from tests.processes import GatewayProcess


# A module's, not the session's: as long as it lives, no other test can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=tool(*CHROMIUM), args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Page]:
    """The page as a visitor finds it; an error in one of its scripts is a failure."""
    context = browser.new_context(base_url=gateway.url)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto("/")
    page.locator("#settings-form [name=model] option").first.wait_for(state="attached")
    yield page
    context.close()
    assert errors == []
