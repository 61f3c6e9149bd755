"""The chat: questions, answers, and what a user may do with them; history in the browser."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.browser import (
    CHROMIUM,
    answers,
    ask,
    ask_and_wait,
    chunks_in,
    event,
    said,
    script_answers,
    set_fields,
)
from tests.suite.tools import needs_tool
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.processes import GatewayProcess

pytestmark = needs_tool("Chromium", *CHROMIUM)
QUESTION = "Tell me of a lamb."

# As soon as there is text, so that nothing depends on how fast it comes.
STOP_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".answer .body")?.textContent) return;
  observer.disconnect();
  document.getElementById("prompt").dispatchEvent(
    new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
}).observe(document.getElementById("messages"), {subtree: true, childList: true})"""


def running(gateway: GatewayProcess) -> int:
    with urllib.request.urlopen(gateway.url + "/ssd/fleet", timeout=60) as answer:
        return sum(target["running"] for target in json.load(answer)["targets"])


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
    expect(facts).to_contain_text(f"{chunks[-1]['usage']['completion_tokens']} tokens")
    expect(facts).to_contain_text("tokens/s")
    expect(facts).to_contain_text("first token")
    expect(facts).to_contain_text("seed 5")


def test_a_stopped_answer_keeps_what_it_has_and_frees_the_target(
    page: Page, gateway: GatewayProcess
) -> None:
    answer = stopped_answer(page)
    assert answer.locator(".body").inner_text().strip()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    wait_until(lambda: running(gateway) == 0, "the target still runs what was stopped")


def test_a_regenerated_answer_takes_the_place_of_the_first(page: Page) -> None:
    sent = script_answers(page, said("one"), said("two"))
    ask_and_wait(page, QUESTION)
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).locator(".body")).to_have_text(["two"])
    assert sent[0]["messages"] == sent[1]["messages"]


def test_an_edited_question_is_where_the_conversation_goes_on(page: Page) -> None:
    sent = script_answers(page, said("one"), said("two"), said("three"))
    ask_and_wait(page, "first")
    ask_and_wait(page, "second")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").fill("instead")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".question .plain")).to_have_text("instead")
    expect(answers(page).locator(".body")).to_have_text("three")
    assert sent[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]
    assert sent[2]["messages"] == [{"role": "user", "content": "instead"}]


def test_the_system_prompt_goes_first(page: Page) -> None:
    sent = script_answers(page, said("one"))
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt of this conversation").fill("Be brief.")
    ask_and_wait(page, QUESTION)
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_history_survives_a_reload_and_conversations_are_apart(page: Page) -> None:
    script_answers(page, said("one"), said("two"))
    ask_and_wait(page, "first")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    ask_and_wait(page, "second")
    page.reload()
    expect(page.locator(".question .plain")).to_have_text("second")
    expect(answers(page).locator(".body")).to_have_text("two")
    listed = page.locator("#conversations button")
    expect(listed).to_have_text(["second", "first"])
    listed.last.click()
    expect(answers(page).locator(".body")).to_have_text("one")


def test_a_conversation_is_renamed_deleted_and_had_back(page: Page) -> None:
    script_answers(page, said("one"))
    ask_and_wait(page, "first")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the conversation").fill("Lambs")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations button")).to_have_text("Lambs")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations button")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations button")).to_have_text("Lambs")
    expect(answers(page).locator(".body")).to_have_text("one")


def test_history_is_bounded_and_the_oldest_go_first(page: Page) -> None:
    script_answers(page, said("one"))
    page.evaluate("""() => { for (let i = 0; i < 60; i += 1) localStorage.setItem(
      `ssd.conversation.${i}`,
      JSON.stringify({id: String(i), title: `old ${i}`, system: "", messages: [], changed: i}))}""")
    page.reload()
    page.get_by_role("button", name="New conversation").click()
    ask_and_wait(page, "newest")
    listed = page.locator("#conversations button")
    expect(listed).to_have_count(50)
    expect(listed.first).to_have_text("newest")
    expect(listed.last).to_have_text("old 11")


def test_what_the_gateway_refuses_is_said_in_place_and_the_question_stays(page: Page) -> None:
    set_fields(page, temperature="-3")
    answer = ask_and_wait(page, QUESTION)
    expect(answer.get_by_role("alert")).to_contain_text("temperature")
    expect(page.locator(".question .plain")).to_have_text(QUESTION)
    set_fields(page, temperature="0", max_tokens="4")
    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .facts")).to_contain_text("4 tokens")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_setting_that_is_no_number_is_not_sent(page: Page) -> None:
    set_fields(page, top_p="much")
    answer = ask_and_wait(page, QUESTION)
    expect(answer.get_by_role("alert")).to_have_text("Top-p: “much” is not a number.")


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (event({"error": {"message": "The target is gone."}}), "The target is gone."),
        ("", "The connection ended before the answer did."),
    ],
)
def test_an_answer_that_breaks_off_says_why_and_keeps_its_text(
    page: Page, ending: str, words: str
) -> None:
    begun = ": ping\n\n" + said("Once", finish=None).partition("\n\n")[0] + "\n\n"
    script_answers(page, begun + ending)
    answer = ask_and_wait(page, QUESTION)
    expect(answer.get_by_role("alert")).to_have_text(words)
    expect(answer.locator(".body")).to_have_text("Once")


def test_a_key_is_sent_as_a_bearer_and_kept(page: Page) -> None:
    script_answers(page, said("one"))
    set_fields(page, key="secret-1")
    page.reload()
    with page.expect_request("**/v1/chat/completions") as caught:
        ask_and_wait(page, QUESTION)
    assert caught.value.headers["authorization"] == "Bearer secret-1"


def test_a_seed_keeps_all_its_digits(page: Page) -> None:
    """Numbers of the browser's language hold 53 bits."""
    sent: list[str] = []
    metrics = '{"choices": [], "metrics": {"ssd": {"mode": "off", "seed": 12345678901234567891}}}'
    page.on("request", lambda request: sent.append(request.post_data or ""))
    script_answers(page, said("one").replace("data: [DONE]", f"data: {metrics}\n\ndata: [DONE]"))
    set_fields(page, seed="12345678901234567891")
    answer = ask_and_wait(page, QUESTION)
    assert any('"seed":12345678901234567891}' in body for body in sent)
    expect(answer.locator(".facts")).to_contain_text("seed 12345678901234567891")


def test_a_model_without_a_chat_template_continues_the_plain_prompt(page: Page) -> None:
    entry = {"id": "plain", "object": "model", "has_chat_template": False}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [entry]}))
    page.reload()
    expect(page.locator("#notice")).to_contain_text("no chat template")
    sent = script_answers(page, said("one").replace('"delta": {"content": "one"}', '"text": "one"'))
    answer = ask_and_wait(page, "Once upon")
    expect(answer.locator(".body")).to_have_text("one")
    assert sent[0]["prompt"] == "Once upon"
    assert "messages" not in sent[0]


def test_shift_and_enter_break_the_line(page: Page) -> None:
    sent = script_answers(page, said("one"))
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(1)
    assert sent[0]["messages"] == [{"role": "user", "content": "first\nsecond"}]


def test_a_conversation_can_be_left_while_it_is_being_answered(page: Page) -> None:
    script_answers(page, said("one"))
    ask(page, "first")
    page.get_by_role("button", name="New conversation").click()
    page.locator("#conversations button").click()
    expect(answers(page).locator(".body")).to_have_text("one")
