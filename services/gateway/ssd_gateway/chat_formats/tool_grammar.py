"""Grammars of calls, in llguidance's Lark: calls alone, or text that may end in calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def _grammar(
    form: ToolFormat, tools: Sequence[CallableTool], start: str, thinking: Thinking
) -> str:
    opening = [_quoted(f'{{"name": "{tool.name}", "{form.arguments}": ') for tool in tools]
    objects = " | ".join(f"{text} arguments_{i}" for i, text in enumerate(opening))
    rules = [
        f"start: {start}",
        f"call: {_quoted(form.before)} object {_quoted(form.after)}",
        f'object: ({objects}) "}}"',
        *(f"arguments_{i}: %json {_schema(tool)}" for i, tool in enumerate(tools)),
        *([] if thinking is Thinking.NEVER else THOUGHTS),
    ]
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _thoughts(thinking: Thinking) -> str:
    return {Thinking.NEVER: "", Thinking.MAYBE: "thoughts?", Thinking.INSIDE: "thought"}[thinking]


def _further(form: ToolFormat, several: bool) -> str:
    return f"({_quoted(form.separator)} call)*" if several else ""


def _schema(tool: CallableTool) -> str:
    return json.dumps({**tool.schema, "x-guidance": ON_ONE_LINE})


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
