"""Text of a model is shown and never run: HTML, scripts, links, terminal codes."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.page.browser import CHROMIUM, ask_and_wait, said, script_answers, show_origins
from tests.suite.tools import needs_tool

if TYPE_CHECKING:
    from tests.processes import GatewayProcess

pytestmark = needs_tool("Chromium", *CHROMIUM)
HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'></svg>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "`<b>` and **<i onmouseover=ran=1>**",
    "```html\n<script>window.ran = 1</script>\n```",
    "| <script>window.ran=1</script> | b |\n|---|---|\n| <img src=x onerror=ran=1> | d |",
    "[click](javascript:window.ran=1)",
    "[click](JaVaScRiPt:window.ran=1)",
    "[click](  data:text/html,<script>window.ran=1</script>)",
    "[click](vbscript:x) <javascript:window.ran=1>",
    "![x](javascript:window.ran=1)",
)


def rendered(page: Page, text: str) -> Locator:
    script_answers(page, said(text))
    return ask_and_wait(page, "Say it.").locator(".body")


# What the policy had to stop: nothing may even try.
LISTEN = """window.stopped = [];
addEventListener("securitypolicyviolation", event => window.stopped.push(event.blockedURI));"""


def check_that_nothing_ran(page: Page) -> None:
    assert page.evaluate("() => window.ran") is None
    assert page.evaluate("() => window.stopped") == []


@pytest.mark.parametrize("view", ["rendered", "origins"])
def test_what_a_model_says_does_not_run(page: Page, view: str) -> None:
    page.add_init_script(LISTEN)
    page.reload()
    if view == "origins":
        show_origins(page)
    body = rendered(page, "\n\n".join(HOSTILE))
    expect(body).to_contain_text("<script>window.ran = 1</script>")
    expect(body).to_contain_text("<img src=x onerror='window.ran = 1'>")
    expect(body).to_contain_text("javascript:window.ran=1")
    for tag in ("script", "img", "svg", "iframe", "a", "i", "b"):
        expect(body.locator(tag)).to_have_count(0)
    check_that_nothing_ran(page)
    page.reload()  # out of the history, it is text, too
    expect(page.locator(".answer .body")).to_contain_text("<script>window.ran = 1</script>")
    check_that_nothing_ran(page)


def test_a_questions_text_and_a_conversations_name_do_not_run_either(page: Page) -> None:
    script_answers(page, said("one"))
    ask_and_wait(page, HOSTILE[1])
    expect(page.locator(".question .plain")).to_have_text(HOSTILE[1])
    expect(page.locator("#conversations button")).to_have_text(HOSTILE[1])
    expect(page.locator("main img")).to_have_count(0)


def test_links_that_open_pages_and_mails_are_links(page: Page) -> None:
    text = "[one](https://a.example/x_(y)) http://b.example/z. <mailto:c@d.example> ![e](http://f.example)"
    links = rendered(page, text).locator("a")
    found = links.evaluate_all("all => all.map(a => [a.href, a.rel, a.textContent])")
    rel = "noopener noreferrer"
    assert found == [
        ["https://a.example/x_(y)", rel, "one"],
        ["http://b.example/z", rel, "http://b.example/z"],
        ["mailto:c@d.example", rel, "mailto:c@d.example"],
        ["http://f.example/", rel, "e"],
    ]


def test_terminal_codes_and_what_hides_or_reorders_text_is_made_visible(page: Page) -> None:
    text = "\x1b[31mred\x1b[0m \x07bell \x9b2J \u202egnp.exe \u200bzero\x7f \U000e0041tag"
    expected = "␛[31mred␛[0m ␇bell �2J �gnp.exe zero␡ �tag"
    body = rendered(page, text)
    assert body.inner_text().strip() == expected
    show_origins(page)
    assert body.inner_text().strip() == expected


def test_markdown_is_rendered(page: Page) -> None:
    body = rendered(
        page,
        "# Title\n\nA **bold** *word* and `code`.\n\n- one\n  - inside\n- two\n1. first\n\n"
        "> quoted\n\n```python\nx = 1 < 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    )
    expect(body.get_by_role("heading")).to_have_text("Title")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("em")).to_have_text("word")
    expect(body.locator("p code")).to_have_text("code")
    expect(body.locator("ul ul li")).to_have_text("inside")
    expect(body.locator("ol li")).to_have_text("first")
    expect(body.locator("blockquote")).to_have_text("quoted")
    expect(body.locator("pre code")).to_have_text("x = 1 < 2")
    expect(body.locator("td")).to_have_text(["1", "2"])


def test_code_is_copied_as_it_is_shown(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    body = rendered(page, "```sh\necho a\x1b[2K\n```")
    body.get_by_role("button", name="Copy").click()
    expect(body.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == "echo a␛[2K"


def test_no_text_is_slow_to_read(page: Page) -> None:
    """A pattern that goes back and forth would take hours over these, and the test would hang."""
    signs = ("[", "*", "_", "`", "**a ", "![](", "> ", "- ", "|", "~~", "<", "#")
    texts = [sign * 30_000 + "\n" + " " * 30_000 + "x" for sign in signs]
    texts += [sign * (19_000 // len(sign)) for sign in signs]  # short enough for emphasis and links
    script_answers(page, *(said(f"{text}\n\nend") for text in texts))
    for _ in texts:
        page.get_by_role("button", name="New conversation").click()
        expect(ask_and_wait(page, "Say it.").locator(".body")).to_contain_text("end")


def test_the_policy_is_in_force(page: Page, gateway: GatewayProcess) -> None:
    for path in ("/", "/page/app.js", "/page/app.css"):
        with urllib.request.urlopen(gateway.url + path, timeout=60) as answer:
            policy = answer.headers["Content-Security-Policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == rules["form-action"] == rules["base-uri"] == "'none'"
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = 1";
      document.body.append(script);
      document.body.setAttribute("onclick", "window.ran = 1");
      document.body.click();
    }""")
    assert page.evaluate("() => window.ran") is None


def test_the_page_asks_nobody_but_its_gateway(page: Page, gateway: GatewayProcess) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    for view in ("Race", "Timeline", "Fleet"):
        page.get_by_role("tab", name=view).click()
    expect(page.locator(".target")).to_have_count(1)
    assert len(asked) > 10
    assert all(url.startswith((gateway.url, "data:")) for url in asked)
