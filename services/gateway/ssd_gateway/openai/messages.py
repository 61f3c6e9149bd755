"""Messages as chat templates take them: what is checked of them, and what is left out."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ssd_gateway.http.errors import bad_request

# Fields of messages and of calls in them that are left out: they change nothing.
IGNORED = ("refusal", "annotations", "provider_specific_fields", "thinking_blocks", "cache_control")
IGNORED_OF_CALLS = ("index", "provider_specific_fields", "cache_control")
REFUSED = {
    "function_call": "is not supported here; use tool_calls",
    "audio": "is not supported here: only text is; leave it out",
}
WITH_TEXT = ("user", "system", "developer")  # roles whose messages have a content


def messages_for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of earlier calls are objects, and what is null is left out: but for a content, as
    templates look for it."""
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(place: str, given: dict[str, Any]) -> dict[str, Any]:
    message = _asking(given, IGNORED)
    for name, problem in REFUSED.items():
        if message.get(name):
            raise bad_request(f"{place}.{name}", problem, "unsupported_parameter")
    if message.get("role") in WITH_TEXT and message.get("content") in (None, []):
        problem = "is missing: a text is needed, or a list of parts that are texts"
        raise bad_request(f"{place}.content", problem, "missing_required_parameter")
    if "content" in given:
        message["content"] = given["content"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = list(_calls(f"{place}.tool_calls", calls))
    return message


def _asking(given: dict[str, Any], ignored: Sequence[str] = ()) -> dict[str, Any]:
    return {n: value for n, value in given.items() if value is not None and n not in ignored}


def _calls(place: str, calls: list[Any]) -> Iterator[Any]:
    for i, given in enumerate(calls):
        call = _asking(given, IGNORED_OF_CALLS) if isinstance(given, dict) else given
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            call["function"] = _function(f"{place}[{i}].function", _asking(function))
        yield call


def _function(place: str, function: dict[str, Any]) -> dict[str, Any]:
    if isinstance(text := function.get("arguments"), str):
        function["arguments"] = _arguments(f"{place}.arguments", text)
    return function


def _arguments(place: str, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(place, f"is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise bad_request(place, "must be an object in JSON")
    return arguments
