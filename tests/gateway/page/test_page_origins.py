"""Each token has the colour of its origin: that which the API reports, and the legend explains."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.browser import (
    CHROMIUM,
    ask_and_wait,
    chunks_in,
    event,
    script_answers,
    set_fields,
    show_origins,
    tokens_reported,
    tokens_shown,
)
from tests.suite.tools import needs_tool

pytestmark = needs_tool("Chromium", *CHROMIUM)
ORIGINS = ("cache", "just_in_time", "ngram", "sync", "grammar", "target")

LOOKS = """spans => spans.map(span => {
  const style = getComputedStyle(span);
  const line = `${style.textDecorationLine} ${style.textDecorationStyle}`;
  return [span.dataset.origin, style.backgroundColor, line];
})"""


def looks(place: Locator) -> list[tuple[str, str, str]]:
    """Origin, colour and underline of each token."""
    return [tuple(each) for each in place.locator(".token").evaluate_all(LOOKS)]


def test_colours_match_the_origins_that_the_api_reports(page: Page) -> None:
    set_fields(page, max_tokens="48", seed="3")
    show_origins(page)
    with page.expect_response("**/v1/chat/completions") as caught:
        answer = ask_and_wait(page, "Tell me of a lamb.")
    stream = caught.value.text()
    assert tokens_shown(answer) == tokens_reported(stream)
    counted = chunks_in(stream)[-1]
    assert len(tokens_shown(answer)) == counted["usage"]["completion_tokens"]
    legend = {origin: look for origin, *look in looks(page.locator("#legend"))}
    assert all(look == legend[origin] for origin, *look in looks(answer))


def test_every_origin_has_a_colour_and_an_underline_of_its_own(page: Page) -> None:
    tokens = [{"text": f" {origin}", "origin": origin} for origin in ORIGINS]
    text = "".join(token["text"] for token in tokens)
    choice = {"delta": {"content": text}, "token_origins": tokens, "finish_reason": "stop"}
    script_answers(page, event({"choices": [choice]}) + "data: [DONE]\n\n")
    show_origins(page)
    answer = ask_and_wait(page, "All of them.")
    shown = looks(answer)
    assert [origin for origin, _, _ in shown] == list(ORIGINS)
    assert len({colour for _, colour, _ in shown}) == len(ORIGINS)
    assert len({line for _, _, line in shown}) == len(ORIGINS)
    assert shown == looks(page.locator("#legend"))
    expect(answer.locator(".token").nth(1)).to_have_attribute("title", "just in time")
    label = "Tokens: 1 cache, 1 just in time, 1 n-gram, 1 sync, 1 grammar, 1 target"
    expect(answer.get_by_role("img")).to_have_attribute("aria-label", label)


def test_rendered_and_origins_are_two_views_of_one_answer(page: Page) -> None:
    choice = {
        "delta": {"content": "**bold**"},
        "token_origins": [
            {"text": "**bo", "origin": "cache"},
            {"text": "ld**", "origin": "target"},
        ],
    }
    script_answers(page, event({"choices": [choice]}) + "data: [DONE]\n\n")
    answer = ask_and_wait(page, "Bold.")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(page.locator("#legend")).to_be_hidden()
    show_origins(page)
    assert tokens_shown(answer) == [("**bo", "cache"), ("ld**", "target")]
    page.reload()  # the choice and the origins are kept
    assert tokens_shown(page.locator(".answer")) == [("**bo", "cache"), ("ld**", "target")]
    page.get_by_label("Rendered").check(force=True)
    expect(page.locator(".answer strong")).to_have_text("bold")
