"""What the Python scripts share: where the gateway is, and what they tell of each scenario.

It is imported by every client's own interpreter: the standard library is all that it needs.
"""

import inspect
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["SSD_URL"]  # OpenAI's API, with /v1
MODEL, SHORT_MODEL = "stories-target", "stories-short"  # the second has a context of 256 tokens
KEY = "none"
STORY = "Tell me a story about a brave hen."
TOO_LONG = "Tell me a story about a hen and a fox. " * 300  # of 2048 tokens
TOO_LONG_FOR_SHORT = "Tell me a story about a hen and a fox. " * 40

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Basel", "Chur"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}

_scenarios: list[tuple[str, Callable[[], Any]]] = []


def scenario(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        _scenarios.append((name, run))
        return run

    return register


def check(holds: Any, found: Any) -> None:
    """``found``: what to show where it does not hold."""
    if not holds:
        raise AssertionError(f"not as it should be: {found!r}")


def check_weather(arguments: Any) -> None:
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    check(set(arguments) == {"city", "days"}, arguments)
    check(arguments["city"] in WEATHER["properties"]["city"]["enum"], arguments)
    check(arguments["days"] in WEATHER["properties"]["days"]["enum"], arguments)


def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], run: Any) -> Any:
    """The error of one of these kinds that a call ends with."""
    try:
        found = run()
    except kinds as error:
        return error
    raise AssertionError(f"no error, but {found!r}")


def main() -> None:
    """Run all scenarios, and tell of each in a line of JSON."""
    for name, run in _scenarios:
        error = ""
        try:
            if inspect.iscoroutinefunction(run):
                import asyncio

                asyncio.run(run())
            else:
                run()
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"scenario": name, "error": error}), flush=True)
