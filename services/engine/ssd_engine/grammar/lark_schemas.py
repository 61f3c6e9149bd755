"""Finds the JSON schemas inside a grammar in Lark: what follows ``%json``."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

# Strings, expressions and comments may look like a schema's beginning.
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<json>%json)\s*(?=[{\[tf])'
)
_HEAD = re.compile(r"^[ \t]*[?!_]*([A-Za-z]\w*)[^:\n\"/]*:", re.MULTILINE)


class LarkSchema(NamedTuple):
    rule: str  # that it is of; "" where none is found
    begin: int
    end: int  # in the text
    schema: Any


def lark_schemas(text: str) -> list[LarkSchema]:
    """What is no JSON is left to the library, which refuses it."""
    heads = [(found.start(), found[1]) for found in _HEAD.finditer(text)]
    decode = json.JSONDecoder().raw_decode
    schemas: list[LarkSchema] = []
    at = 0
    while (token := _TOKEN.search(text, at)) is not None:
        at = token.end()
        if token["json"]:
            try:
                schema, end = decode(text, at)
            except (ValueError, RecursionError):
                continue
            head = bisect_right(heads, token.start(), key=lambda each: each[0])
            schemas.append(LarkSchema(heads[head - 1][1] if head else "", at, end, schema))
            at = end
    return schemas


def bare_rules(text: str) -> str:
    """The grammar without its schemas, strings, expressions and comments."""
    return _TOKEN.sub("", _replaced(text, lambda schema: ""))


def with_schemas(text: str, change: Callable[[Any], Any]) -> str:
    """The text with other schemas; ``change`` returns the same object for one that stays."""

    def written(given: Any) -> str | None:
        changed = change(given)
        return None if changed is given else json.dumps(changed)

    return _replaced(text, written)


def _replaced(text: str, write: Callable[[Any], str | None]) -> str:
    pieces, at = [], 0
    for each in lark_schemas(text):
        written = write(each.schema)
        pieces += [
            text[at : each.begin],
            text[each.begin : each.end] if written is None else written,
        ]
        at = each.end
    return "".join([*pieces, text[at:]])
