"""Text of a model is shown and never run: HTML, scripts, links, terminal codes."""

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.callers import ask
from tests.gateway.page.browser import CHROMIUM, ask_and_wait, said, script_answers, show_origins
from tests.processes import GatewayProcess
from tests.suite.tools import needs_tool

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


def rendered(page: Page, text: str, question: str = "Say it.") -> Locator:
    script_answers(page, said(text))
    return ask_and_wait(page, question).locator(".body")


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
    body = rendered(page, "\n\n".join(HOSTILE), HOSTILE[1])
    expect(body).to_contain_text("<script>window.ran = 1</script>")
    expect(body).to_contain_text("<img src=x onerror='window.ran = 1'>")
    expect(body).to_contain_text("javascript:window.ran=1")
    for tag in ("script", "img", "svg", "iframe", "a", "i", "b"):
        expect(body.locator(tag)).to_have_count(0)
    for place in (".question .plain", "#conversations button"):
        expect(page.locator(place)).to_have_text(HOSTILE[1])
    page.reload()  # out of the history, it is text, too
    expect(page.locator(".answer .body").first).to_contain_text("<script>window.ran = 1</script>")
    check_that_nothing_ran(page)


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
    for place, text in {
        "h1, h2, h3": "Title",
        "strong": "bold",
        "em": "word",
        "p code": "code",
        "ul ul li": "inside",
        "ol li": "first",
        "blockquote": "quoted",
        "pre code": "x = 1 < 2",
        "td": ["1", "2"],
    }.items():
        expect(body.locator(place)).to_have_text(text)


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
        policy = ask(gateway, path).headers["Content-Security-Policy"]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        for names, allowed in (
            (("default-src", "frame-ancestors", "form-action", "base-uri"), "'none'"),
            (("script-src", "style-src", "connect-src"), "'self'"),
        ):
            assert {rules[name] for name in names} == {allowed}
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
