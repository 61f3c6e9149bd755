"""The chat: questions, answers, and what a user may do with them; history in the browser; tokens in
the colours of their origins."""

import re

from playwright.sync_api import Locator, Page, expect

from tests.gateway.callers import in_flight
from tests.gateway.page.browser import (
    CHROMIUM,
    answers,
    ask_and_wait,
    chunks_in,
    event,
    expect_shown,
    said,
    script_answers,
    set_fields,
    show_origins,
    tokens_reported,
    tokens_shown,
)
from tests.processes import TracedPair
from tests.suite.tools import needs_tool
from tests.waiting import wait_until

pytestmark = needs_tool("Chromium", *CHROMIUM)
QUESTION = "Tell me of a lamb."

# As soon as there is text, so that nothing depends on how fast it comes.
STOP_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".answer .body")?.textContent) return;
  observer.disconnect();
  document.getElementById("prompt").dispatchEvent(
    new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
}).observe(document.getElementById("messages"), {subtree: true, childList: true})"""


def stopped_answer(page: Page) -> Locator:
    """On a busy machine, one that is not stopped may be complete before the page has a turn."""
    for _ in range(5):
        page.evaluate(STOP_AT_FIRST_TEXT)
        answer = ask_and_wait(page, QUESTION)
        expect(answer.locator(".facts")).not_to_be_empty()
        if "stopped" in answer.locator(".facts").inner_text():
            return answer
    raise AssertionError("no answer was stopped")


def test_a_question_is_answered_with_the_apis_text_and_its_statistics(page: Page) -> None:
    set_fields(page, max_tokens="24", seed="5", temperature="0.8")
    with page.expect_response("**/v1/chat/completions") as caught:
        answer = ask_and_wait(page, QUESTION)
    sent = caught.value.request.post_data_json
    assert (sent["max_tokens"], sent["seed"], sent["temperature"]) == (24, 5, 0.8)
    assert "top_p" not in sent  # what is empty is left to the server
    chunks = chunks_in(caught.value.text())
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    shown = answer.locator(".body").inner_text()
    assert re.findall(r"\w+", shown) == re.findall(r"\w+", text)
    facts = answer.locator(".facts")
    count = chunks[-1]["usage"]["completion_tokens"]
    for words in (f"{count} tokens", "tokens/s", "first token", "seed 5"):
        expect(facts).to_contain_text(words)


def test_a_stopped_answer_keeps_what_it_has_and_frees_the_target(
    page: Page, traced_pair: TracedPair
) -> None:
    answer = stopped_answer(page)
    assert answer.locator(".body").inner_text().strip()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    wait_until(lambda: in_flight(traced_pair[0]) == 0, "the target still runs what was stopped")


def test_a_question_is_asked_again_and_edited_where_the_conversation_goes_on(page: Page) -> None:
    sent = script_answers(page, said("none"), said("one"), said("two"), said("three"))
    ask_and_wait(page, "first")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).locator(".body")).to_have_text(["one"])
    ask_and_wait(page, "second")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("instead")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect_shown(page, "instead", "three")
    first, answer = {"role": "user", "content": "first"}, {"role": "assistant", "content": "one"}
    second, instead = ({"role": "user", "content": each} for each in ("second", "instead"))
    told = [each["messages"] for each in sent]
    assert told == [[first], [first], [first, answer, second], [instead]]


def test_history_survives_a_reload_and_conversations_have_names_and_can_be_deleted(
    page: Page,
) -> None:
    sent = script_answers(page, said("one"), said("two"))
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt of this conversation").fill("Be brief.")
    ask_and_wait(page, "first")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    ask_and_wait(page, "second")
    page.reload()
    expect_shown(page, "second", "two")
    listed = page.locator("#conversations button")
    expect(listed).to_have_text(["second", "first"])
    listed.last.click()
    expect_shown(page, "first", "one")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the conversation").fill("Lambs")
    page.keyboard.press("Enter")
    expect(listed).to_have_text(["Lambs", "second"])
    page.get_by_role("button", name="Delete").click()
    expect(listed).to_have_text(["second"])
    page.get_by_role("button", name="Undo").click()
    expect(listed).to_have_text(["Lambs", "second"])
    expect_shown(page, "first", "one")


def test_history_is_bounded_and_the_oldest_go_first(page: Page) -> None:
    script_answers(page, said("one"))
    page.evaluate("""() => { for (let i = 0; i < 60; i += 1) localStorage.setItem(
      `ssd.conversation.${i}`,
      JSON.stringify({id: String(i), title: `old ${i}`, system: "", messages: [], changed: i}))}""")
    page.reload()
    page.get_by_role("button", name="New conversation").click()
    ask_and_wait(page, "newest")
    listed = page.locator("#conversations button")
    expect(listed).to_have_text(["newest", *(f"old {i}" for i in range(59, 10, -1))])


def test_what_the_gateway_refuses_is_said_in_place_and_the_question_stays(page: Page) -> None:
    set_fields(page, temperature="-3")
    answer = ask_and_wait(page, QUESTION)
    expect(answer.get_by_role("alert")).to_contain_text("temperature")
    expect(page.locator(".question .plain")).to_have_text(QUESTION)
    set_fields(page, temperature="0", max_tokens="4")
    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .facts")).to_contain_text("4 tokens")
    expect(page.get_by_role("alert")).to_be_hidden()
    set_fields(page, top_p="much")
    alert = ask_and_wait(page, QUESTION).get_by_role("alert")
    expect(alert).to_have_text("Top-p: “much” is not a number.")


def test_an_answer_that_breaks_off_says_why_and_keeps_its_text(page: Page) -> None:
    begun = ": ping\n\n" + said("Once", finish=None).partition("\n\n")[0] + "\n\n"
    script_answers(page, begun + event({"error": {"message": "The target is gone."}}), begun)
    for words in ("The target is gone.", "The connection ended before the answer did."):
        answer = ask_and_wait(page, QUESTION)
        expect(answer.get_by_role("alert")).to_have_text(words)
        expect(answer.locator(".body")).to_have_text("Once")


def test_a_key_is_a_bearer_and_a_seed_keeps_all_its_digits(page: Page) -> None:
    """Numbers of the browser's language hold 53 bits."""
    metrics = '{"choices": [], "metrics": {"ssd": {"mode": "off", "seed": 12345678901234567891}}}'
    script_answers(page, said("one").replace("data: [DONE]", f"data: {metrics}\n\ndata: [DONE]"))
    set_fields(page, seed="12345678901234567891", key="secret-1")
    page.reload()
    with page.expect_request("**/v1/chat/completions") as caught:
        answer = ask_and_wait(page, QUESTION)
    assert caught.value.headers["authorization"] == "Bearer secret-1"
    assert '"seed":12345678901234567891}' in (caught.value.post_data or "")
    expect(answer.locator(".facts")).to_contain_text("seed 12345678901234567891")


def test_a_model_without_a_chat_template_continues_the_plain_prompt(page: Page) -> None:
    entry = {"id": "plain", "object": "model", "has_chat_template": False}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [entry]}))
    page.reload()
    expect(page.locator("#notice")).to_contain_text("no chat template")
    sent = script_answers(page, said("one").replace('"delta": {"content": "one"}', '"text": "one"'))
    ask_and_wait(page, "Once upon")
    expect_shown(page, "Once upon", "one")
    assert (sent[0]["prompt"], "messages" in sent[0]) == ("Once upon", False)


def test_shift_and_enter_break_the_line_and_a_conversation_can_be_left_meanwhile(
    page: Page,
) -> None:
    sent = script_answers(page, said("one"))
    page.get_by_label("Message", exact=True).focus()
    for words, key in (("first", "Shift+Enter"), ("second", "Enter")):
        page.keyboard.type(words)
        page.keyboard.press(key)
    page.get_by_role("button", name="New conversation").click()
    page.locator("#conversations button").click()
    expect(answers(page).locator(".body")).to_have_text("one")
    assert sent[0]["messages"] == [{"role": "user", "content": "first\nsecond"}]


# Origins

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
    assert len(tokens_shown(answer)) == chunks_in(stream)[-1]["usage"]["completion_tokens"]
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
    origins, colours, lines = zip(*shown, strict=True)
    assert origins == ORIGINS
    assert len(set(colours)) == len(set(lines)) == len(ORIGINS)
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
