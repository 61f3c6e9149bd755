"""The page for everybody: keyboard, screen reader, light and dark, a phone."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.page.browser import CHROMIUM, ask_and_wait, expect_shown, said, script_answers
from tests.suite.scale import full_only
from tests.suite.tools import needs_tool

pytestmark = needs_tool("Chromium", *CHROMIUM)
VIEWS = ("Chat", "Race", "Timeline", "Fleet")
GROUND = "() => getComputedStyle(document.body).backgroundColor"
FOCUSED = "() => { const e = document.activeElement; return e.id || e.textContent.trim() }"
OUTLINE = """() => {
  const ringed = [document.activeElement, document.activeElement.closest("form")];
  return ringed.some(e => e && getComputedStyle(e).outlineStyle !== "none");
}"""


# The ratio of text to its ground, of which the web's guidelines ask 4.5 for small text.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d");
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return ["body", ".hint", ".tabs button", "#rename-conversation"].map(selector => {
    const text = light(getComputedStyle(document.querySelector(selector)).color);
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  });
}"""


def brightness(page: Page) -> int:
    return sum(map(int, re.findall(r"\d+", page.evaluate(GROUND))[:3]))


def press_until(page: Page, key: str, wanted: str) -> None:
    """Each element on the way shows that it has the focus."""
    met: list[str] = []
    while wanted not in met:
        assert len(met) < 60, f"the keyboard reaches only {met}"
        page.keyboard.press(key)
        met.append(page.evaluate(FOCUSED))
        assert page.evaluate(OUTLINE), met[-1]


def test_all_of_it_works_with_the_keyboard_alone(page: Page) -> None:
    script_answers(page, said("one"), said("two"), said("three"))
    page.keyboard.type("first")  # the message has the focus at the start
    page.keyboard.press("Enter")
    expect_shown(page, "first", "one")
    press_until(page, "Shift+Tab", "Regenerate")
    page.keyboard.press("Enter")
    expect_shown(page, "first", "two")
    page.locator("#prompt").focus()
    press_until(page, "Shift+Tab", "Edit")
    page.keyboard.press("Enter")
    page.keyboard.type("Not ")
    page.keyboard.press("Escape")
    expect_shown(page, "first", "two")  # as it was
    press_until(page, "Shift+Tab", "tab-chat")
    for view in ("race", "timeline", "fleet", "chat"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        expect(page.locator(f"#{view}")).to_be_visible()
    press_until(page, "Tab", "open-settings")
    for key, visible in (("Enter", True), ("Escape", False)):
        page.keyboard.press(key)
        expect(page.get_by_role("dialog")).to_be_visible(visible=visible)
    expect(page.locator("#open-settings")).to_be_focused()


def test_a_screen_reader_is_told_what_happens_and_what_there_is(page: Page) -> None:
    script_answers(page, said("one"))
    ask_and_wait(page, "first")
    expect(page.get_by_role("status").first).to_have_text("Answer finished: 1 token")
    log = page.get_by_role("log", name="Messages")
    expect(log).to_have_attribute("aria-live", "polite")
    expect(log.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "false")
    unnamed = """() => [...document.querySelectorAll("button, input, select, textarea")]
      .filter(e => !e.textContent.trim() && !e.ariaLabel && !e.labels?.length)
      .map(e => e.outerHTML)"""
    assert page.evaluate(unnamed) == []


@pytest.mark.parametrize("width", [360, full_only(390), full_only(820)])
def test_a_narrow_screen_does_not_scroll_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    if width < 400:  # conversations are behind a button
        expect(page.locator("#sidebar")).to_be_hidden()
        button = page.get_by_role("button", name="Conversations", exact=True)
        button.click()
        expect(button).to_have_attribute("aria-expanded", "true")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator("#sidebar")).to_be_hidden()
    long = "a" * 300
    script_answers(
        page, said(f"{long}\n\n```\n{long}\n```\n\n| {long} | b |\n|---|---|\n| 1 | 2 |")
    )
    ask_and_wait(page, long)
    wide = "() => document.documentElement.scrollWidth - innerWidth"
    for view in VIEWS:
        page.get_by_role("tab", name=view).click()
        assert page.evaluate(wide) <= 0, view
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(wide) <= 0
    box = page.get_by_role("dialog").bounding_box()
    assert 0 <= box["x"] <= width - box["width"]


def test_light_and_dark_follow_the_system_until_the_user_chooses(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    light, contrast = brightness(page), page.evaluate(CONTRAST)
    page.emulate_media(color_scheme="dark")
    assert brightness(page) < 200 < light
    assert min([*contrast, *page.evaluate(CONTRAST)]) >= 4.5
    button = page.get_by_role("button", name="Theme")
    button.click()  # light, whatever the system says
    assert brightness(page) == light
    page.reload()
    assert brightness(page) == light
    button.click()  # dark
    page.emulate_media(color_scheme="light")
    assert brightness(page) < 200
    button.click()  # as the system
    assert brightness(page) == light
