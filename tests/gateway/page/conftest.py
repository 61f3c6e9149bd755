"""A browser, and the page of a real gateway in it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from tests.gateway.page.browser import CHROMIUM, PATIENCE_MS
from tests.processes import GatewayProcess
from tests.suite.tools import tool


# The folder's, not the session's: as long as it lives, no other test can run an event loop.
@pytest.fixture(scope="package")
def visitor(gateway: GatewayProcess) -> Iterator[BrowserContext]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--process-per-site"]
        browser = playwright.chromium.launch(executable_path=tool(*CHROMIUM), args=flags)
        context = browser.new_context(base_url=gateway.url, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        yield context
        browser.close()


@pytest.fixture
def page(visitor: BrowserContext) -> Iterator[Page]:
    """The page as a new visitor finds it; an error in one of its scripts is a failure."""
    page = visitor.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto("/")
    page.locator("#settings-form [name=model] option").first.wait_for(state="attached")
    yield page
    page.evaluate("() => localStorage.clear()")
    page.close()
    assert errors == []
