"""What tests of the page do in a browser: open it, ask, and read what it shows."""

import json
import os
from collections.abc import Iterable
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

NO_WINDOW = "chromium-headless-shell"  # takes a third of the time
CHROMIUM = (os.environ.get("CHROMIUM", NO_WINDOW), "chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 120_000  # a hang is a failure; nothing here is about speed
DONE = "data: [DONE]\n\n"


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    """Those that are complete, or have ended otherwise."""
    return page.locator(".answer[aria-busy=false]")


def ask_and_wait(page: Page, text: str) -> Locator:
    """Asks in a conversation whose answers are complete; returns the new answer."""
    count = page.locator(".answer").count()
    ask(page, text)
    expect(answers(page)).to_have_count(count + 1)
    return answers(page).last


def expect_shown(page: Page, question: str, answer: str) -> None:
    """Of a conversation of one question."""
    expect(page.locator(".question .plain")).to_have_text(question)
    expect(answers(page).locator(".body")).to_have_text(answer)


def set_fields(page: Page, **fields: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in fields.items():
        page.locator(f"#settings-form [name={name}]").fill(value)
    page.get_by_role("button", name="Done").click()


def show_origins(page: Page) -> None:
    page.get_by_label("Origins").check(force=True)


def tokens_shown(place: Locator) -> list[tuple[str, str]]:
    """Text and origin of each span."""
    script = "spans => spans.map(span => [span.textContent, span.dataset.origin])"
    return [(text, origin) for text, origin in place.locator(".token").evaluate_all(script)]


def chunks_in(stream: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data:")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def tokens_reported(stream: str) -> list[tuple[str, str]]:
    """Text and origin of each token, as the API said them."""
    choices = [choice for chunk in chunks_in(stream) for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_origins", [])]
    return [(token["text"], token["origin"]) for token in tokens]


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def said(*pieces: str, ids: Iterable[int] = (), finish: str | None = "stop") -> str:
    """The stream of an answer that says just this, a token for each piece."""
    tokens = [{"text": piece, "origin": "target"} for piece in pieces]
    about = {"index": 0, "token_ids": list(ids), "token_origins": tokens, "finish_reason": finish}
    chunk = {"choices": [{**about, "delta": {"content": "".join(pieces)}}]}
    usage = {"prompt_tokens": 1, "completion_tokens": len(pieces)}
    return event(chunk) + event({"choices": [], "usage": usage}) + DONE


def script_answers(page: Page, *streams: str) -> list[dict[str, Any]]:
    """The page's next requests are answered so; returns the bodies that it sends."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        stream = streams[min(len(bodies), len(streams)) - 1]
        route.fulfill(content_type="text/event-stream", body=stream)

    page.route("**/v1/*completions", answer)
    page.route("**/v1/chat/completions", answer)
    return bodies
