"""Grammars of answers, in llguidance's Lark: calls alone, text that may end in calls, an answer
that has a grammar of its own, or calls in its place."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ssd_gateway.chat_formats.reasoning import BEGIN, END, Thinking
from ssd_gateway.chat_formats.tool_format import ToolFormat

# Arguments are written as models have learnt it, on one line: no text is blanks without an end.
ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
THOUGHTS = (
    f"thoughts: {json.dumps(BEGIN)} thought",
    r"thought: inside /\n{0,2}/",
    f"inside[lazy]: ANY_TEXT {json.dumps(END)}",
    "ANY_TEXT: /(?s:.*)/",
)


@dataclass(frozen=True)
class CallableTool:
    name: str
    schema: dict[str, Any]  # of its arguments, which are an object


def calls_alone(
    form: ToolFormat, tools: Sequence[CallableTool], several: bool, thinking: Thinking
) -> str:
    """At least one call, and one at most unless there may be ``several``."""
    start = f"{_thoughts(thinking)} call {_further(form, several)}"
    return _grammar(form, tools, start, thinking)


def calls_in_text(
    form: ToolFormat, tools: Sequence[CallableTool], several: bool, thinking: Thinking
) -> str:
    """Any text; once it has come to the format's trigger, calls alone follow."""
    opened = f"{_quoted(form.before.removeprefix(form.trigger))} object {_quoted(form.after)}"
    further = _further(form, several)
    answers = ["TEXT", f"head {opened} {further}"]
    if not form.before:
        answers.append(f"call {further}")
    start = f"{_thoughts(thinking)} ({' | '.join(answers)})"
    head = f"head[lazy]: TEXT {_quoted(form.trigger)}\nTEXT: /{form.text}/\n"
    return _grammar(form, tools, start, thinking) + head


def calls_or_answer(
    form: ToolFormat, tools: Sequence[CallableTool], several: bool, thinking: Thinking, answer: str
) -> str:
    """``answer``: what the rule of that name is."""
    start = f"{_thoughts(thinking)} (answer | call {_further(form, several)})"
    return _grammar(form, tools, start, thinking) + f"answer: {answer}\n"


def answer_alone(thinking: Thinking, answer: str) -> str:
    return _joined([f"start: {_thoughts(thinking)} answer", f"answer: {answer}"], thinking)


def json_rule(schema: dict[str, Any]) -> str:
    given = schema.get("x-guidance")
    how = {**ON_ONE_LINE, **(given if isinstance(given, dict) else {}), "lenient": False}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": how}).decode()


def _grammar(
    form: ToolFormat, tools: Sequence[CallableTool], start: str, thinking: Thinking
) -> str:
    # In the pieces that JSON is read in: an answer beside it may begin with the same ones.
    opening = " ".join(map(_quoted, ("{", '"name"', ": ")))
    key = " ".join(map(_quoted, (", ", f'"{form.arguments}"', ": ")))
    names = [_quoted(f'"{tool.name}"') for tool in tools]
    objects = " | ".join(f"{name} {key} {rule_of(i)}" for i, name in enumerate(names))
    rules = [
        f"start: {start}",
        f"call: {_quoted(form.before)} object {_quoted(form.after)}",
        f'object: {opening} ({objects}) "}}"',
        *(f"{rule_of(i)}: {json_rule(tool.schema)}" for i, tool in enumerate(tools)),
    ]
    return _joined(rules, thinking)


def rule_of(tool: int) -> str:
    """The rule of its arguments."""
    return f"arguments_{tool}"


def _joined(rules: Sequence[str], thinking: Thinking) -> str:
    thoughts = () if thinking is Thinking.NEVER else THOUGHTS
    return "\n".join(["%llguidance {}", *rules, *thoughts, ""])


def _thoughts(thinking: Thinking) -> str:
    return {Thinking.NEVER: "", Thinking.MAYBE: "thoughts?", Thinking.INSIDE: "thought"}[thinking]


def _further(form: ToolFormat, several: bool) -> str:
    return f"({_quoted(form.separator)} call)*" if several else ""


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
