"""Tools of a request: what is checked of them, which may be called, and how calls are written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.reasoning import Thinking
from ssd_gateway.chat_formats.registry import TOOL_FORMATS
from ssd_gateway.chat_formats.tool_format import ToolFormat
from ssd_gateway.chat_formats.tool_grammar import (
    CallableTool,
    calls_alone,
    calls_in_text,
    calls_or_answer,
    rule_of,
)
from ssd_gateway.http.errors import bad_request
from ssd_gateway.openai.fields import ChatRequest, converted
from ssd_gateway.openai.nulls import without_nulls
from ssd_gateway.openai.structured_output import NamedGrammar

MAX_TOOLS = 128
IGNORED = ("cache_control",)  # beside the function
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class FunctionFields(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Struct):
    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True)
class ToolUse:
    """How the tools of a request may be called."""

    form: ToolFormat
    functions: list[FunctionFields]  # that may be called
    must_call: bool
    several: bool
    all_names: Sequence[str] = ()  # of the request's functions

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.name for each in self.functions)

    def grammar(self, thinking: Thinking, own: NamedGrammar | None) -> NamedGrammar | None:
        """None where nothing is asked of the answer. ``own``: that of an answer without calls."""
        places = {name: f"tools[{i}].function.parameters" for i, name in enumerate(self.all_names)}
        rules = {rule_of(i): places[each.name] for i, each in enumerate(self.functions)}
        about = (self.form, self._tools(), self.several, thinking)
        if own is not None and own.answer is None:
            problem = 'cannot be together with tools, unless tool_choice is "none"'
            raise bad_request(own.param, problem)
        if self.must_call:  # there is no answer that could follow a rule
            text = calls_alone(*about)
        elif own is not None and own.answer is not None:
            text = calls_or_answer(*about, own.answer)
            rules["answer"] = own.param
        elif self.several and not any(each.strict for each in self.functions):
            return None
        else:
            text = calls_in_text(*about)
        return NamedGrammar("tools", pb.Grammar(context_free=text), rules=rules)

    def _tools(self) -> list[CallableTool]:
        schema = _schema if self.must_call else _loose_schema
        return [CallableTool(each.name, schema(each)) for each in self.functions]


def _schema(function: FunctionFields) -> dict[str, Any]:
    if function.parameters is None:
        return NO_ARGUMENTS
    return {"type": "object", **function.parameters}


def _loose_schema(function: FunctionFields) -> dict[str, Any]:
    return _schema(function) if function.strict else {"type": "object"}


def tool_use(fields: ChatRequest, format_name: str) -> ToolUse | None:
    """None where the request has no tools, or none may be called. ``format_name``: how the model
    writes calls."""
    functions, choice = check_tools(fields.tools), fields.tool_choice
    if not functions:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice", "needs tools")
        return None
    chosen = _chosen(choice, functions)
    if not chosen:
        return None
    if format_name not in TOOL_FORMATS:
        raise bad_request(
            "tools",
            "how this model writes calls of tools is not known; the gateway can be told by "
            f"--tool-parser {'|'.join(TOOL_FORMATS)}",
            "unsupported_parameter",
        )
    must_call = choice not in (None, "auto")
    # A function that is named is called once.
    several = fields.parallel_tool_calls is not False and not isinstance(choice, dict)
    names = [function.name for function in functions]
    return ToolUse(TOOL_FORMATS[format_name], chosen, must_call, several, names)


def check_tools(tools: Sequence[dict[str, Any]] | None) -> list[FunctionFields]:
    """The functions, all of whose fields are what they must be."""
    if len(tools or ()) > MAX_TOOLS:
        raise bad_request("tools", f"at most {MAX_TOOLS}, got {len(tools or ())}")
    functions = [each.function for each in converted(tools or [], list[ToolFields], "tools")]
    known: set[str] = set()
    for i, function in enumerate(functions):
        _check(f"tools[{i}].function", function, known)
        known.add(function.name)
    return functions


def tools_for_template(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As chat templates take them: what is null in them, or ignored, is left out."""
    return [_without_ignored(tool) for tool in without_nulls(tools, list[ToolFields])]


def _without_ignored(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name not in IGNORED}


def _check(place: str, function: FunctionFields, known: set[str]) -> None:
    if NAME.fullmatch(function.name) is None:
        raise bad_request(f"{place}.name", "must have 1 to 128 letters, digits, or any of _ . -")
    if function.name in known:
        raise bad_request(f"{place}.name", f"another tool has the name {function.name!r}")
    if (function.parameters or {}).get("type", "object") != "object":
        raise bad_request(f"{place}.parameters.type", 'must be "object"')


def _chosen(choice: Any, functions: list[FunctionFields]) -> list[FunctionFields]:
    """Functions that may be called."""
    match choice:
        case "none":
            return []
        case None | "auto" | "required":
            return functions
        case str():
            raise bad_request("tool_choice", "must be auto, none, required, or name a function")
    name = converted(choice, NamedTool, "tool_choice").function.name
    chosen = [each for each in functions if each.name == name]
    if not chosen:
        raise bad_request("tool_choice.function.name", f"{name!r} is none of the tools")
    return chosen
