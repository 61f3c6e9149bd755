"""Answers with a form: JSON that follows a schema, calls of tools and their results, thoughts."""

import json
from typing import Any

from playwright.sync_api import Page, expect

from tests.gateway.page.browser import (
    CHROMIUM,
    DONE,
    ask_and_wait,
    event,
    said,
    script_answers,
    set_fields,
    show_origins,
)
from tests.suite.tools import needs_tool

pytestmark = needs_tool("Chromium", *CHROMIUM)
QUESTION = "Which colour is it?"
SCHEMA = """{"type": "object", "properties": {"2": {"enum": ["red", "blue"]},
 "1": {"const": 12345678901234567891}}, "required": ["2", "1"], "additionalProperties": false}"""
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
HOSTILE = "<img src=x onerror='window.ran = 1'>\x1b[2J"


def called(*calls: tuple[str, str], thoughts: str = "", finish: str = "tool_calls") -> str:
    """The stream of an answer that calls tools, by name and arguments, one character at a time."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": sign} for sign in thoughts]
    for index, (name, arguments) in enumerate(calls):
        begun = {"id": f"call_{index}", "type": "function"}
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, **begun, "function": function}]})
        pieces = [{"index": index, "function": {"arguments": sign}} for sign in arguments]
        deltas += [{"tool_calls": [piece]} for piece in pieces]
    ended = event({"choices": [{"delta": {}, "finish_reason": finish}]})
    return "".join(event({"choices": [{"delta": delta}]}) for delta in deltas) + ended + DONE


def test_results_of_parallel_calls_go_back_to_the_model(page: Page) -> None:
    oslo, rome = '{"city":"Oslo","days":[1,2]}', '{"city":"Rome \\"<b>\\""}'
    sent = script_answers(
        page, called(("weather", oslo), ("weather", rome), thoughts="Two\nof them."), said("Rain.")
    )
    set_fields(page, tools=TOOLS)
    answer = ask_and_wait(page, QUESTION)
    calls = answer.get_by_role("group", name="Call of weather")
    shown = [
        '{\n  "city": "Oslo",\n  "days": [\n    1,\n    2\n  ]\n}',
        '{\n  "city": "Rome \\"<b>\\""\n}',
    ]
    assert calls.locator("pre").all_inner_texts() == shown
    expect(answer.get_by_text("Two of them.")).to_be_hidden()
    answer.get_by_text("Thoughts").click()
    expect(answer.get_by_text("Two of them.")).to_be_visible()
    calls.last.get_by_label("Result").fill("Sun\nand wind")
    answer.get_by_role("button", name="Send results").click()
    expect(page.locator(".answer[aria-busy=false] .body")).to_have_text(["", "Rain."])
    functions = [{"name": "weather", "arguments": each} for each in (oslo, rome)]
    told = [
        {"id": f"call_{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    assert sent[0]["tools"] == json.loads(TOOLS)
    assert sent[1]["messages"] == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": told},
        {"role": "tool", "tool_call_id": "call_0", "content": ""},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun\nand wind"},
    ]
    page.reload()  # settings, calls and results are kept
    expect(page.get_by_label("Result").last).to_have_value("Sun\nand wind")
    ask_and_wait(page, "And now?")
    assert sent[2]["tools"] == sent[0]["tools"]
    assert sent[2]["messages"][:4] == sent[1]["messages"]
    assert [message["role"] for message in sent[2]["messages"][4:]] == ["assistant", "user"]


def test_a_next_message_takes_results_along_and_leaves_out_a_call_that_was_cut(page: Page) -> None:
    calls = called(("weather", ""), ("weather", '{"city": "Os'), finish="length")
    sent = script_answers(page, calls, said("Rain."))
    answer = ask_and_wait(page, QUESTION)
    shown, cut = answer.get_by_role("group", name="Call of weather").all()
    expect(cut.get_by_text("Cut short: not the whole call.")).to_be_visible()
    expect(cut.get_by_label("Result")).to_be_hidden()
    shown.get_by_label("Result").fill("Snow")
    ask_and_wait(page, "And now?")
    _, assistant, tool, user = sent[1]["messages"]
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_0"]
    assert tool == {"role": "tool", "tool_call_id": "call_0", "content": "Snow"}
    assert user["content"] == "And now?"


def test_calls_thoughts_and_results_are_text_and_never_html(page: Page) -> None:
    hostile = json.dumps({"x": HOSTILE})
    script_answers(page, called((HOSTILE, hostile), thoughts=HOSTILE), said(hostile))
    answer = ask_and_wait(page, QUESTION)
    expect(answer.locator("h3")).to_have_text("Call of <img src=x onerror='window.ran = 1'>␛[2J")
    expect(answer.locator(".thoughts .plain")).to_contain_text("␛[2J")
    set_fields(page, schema="{}")
    answer = ask_and_wait(page, QUESTION)
    expect(answer.locator("pre")).to_have_count(2)
    expect(page.locator("main img")).to_have_count(0)
    assert page.evaluate("() => window.ran") is None


def test_the_result_says_what_the_text_has_come_to(page: Page) -> None:
    whole, cut = '{"a":[],"b":12345678901234567891}', '{"a":[],"b":123'
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or ""))
    script_answers(page, said(whole), said(cut, finish="length"))
    set_fields(page, schema=SCHEMA)
    wrapped = f'"json_schema":{{"name":"answer","schema":{SCHEMA},"strict":true}}'
    result = '{\n  "a": [],\n  "b": 12345678901234567891\n}'
    for text, words, shown in (
        (whole, "Valid JSON. It follows the schema", [result]),
        (cut, "Cut short: not the whole text.", []),
    ):
        answer = ask_and_wait(page, QUESTION)
        expect(answer.locator(".body pre")).to_have_text(text)
        expect(answer.locator(".verdict")).to_contain_text(words)
        assert answer.locator(".result pre").all_inner_texts() == shown
    assert any(f'"response_format":{{"type":"json_schema",{wrapped}}}' in body for body in sent)
    show_origins(page)
    expect(answer.locator(".body .token")).to_have_text(cut)
    expect(answer.locator(".verdict")).to_contain_text(words)


def test_what_is_no_schema_or_no_list_of_tools_is_not_sent(page: Page) -> None:
    sent = script_answers(page, said("one"))
    for field, text, words in (
        ("schema", "[1]", "JSON schema: this must be an object in JSON."),
        ("tools", "[", "Tools: this is not JSON"),
    ):
        set_fields(page, **{field: text})
        answer = ask_and_wait(page, QUESTION)
        expect(answer.get_by_role("alert")).to_contain_text(words)
        page.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.locator(f"#{field}-problem")).to_contain_text(words)
        page.locator(f"[name={field}]").fill("")
        expect(page.locator(f"#{field}-problem")).to_be_hidden()
        page.get_by_role("button", name="Done").click()
    assert sent == []
