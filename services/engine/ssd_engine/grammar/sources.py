"""Writes grammars in the form that the library reads, after what it would not bound is refused."""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from ssd_engine.errors import InputError
from ssd_engine.grammar.json_schemas.bounds import (
    MAX_TEXT,
    Excess,
    check_bounds,
    names_may_be_escaped,
)
from ssd_engine.grammar.lark_bounds import gbnf_excess, lark_excess
from ssd_engine.grammar.lark_schemas import lark_schemas, with_schemas
from ssd_engine.grammar.spec import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MAX_CHOICES = 4096
MAX_REGEX_BYTES = 1 << 16  # all of it may have to come, and is looked at again with each token
# As json.dumps writes it: what need not be chosen takes no time, and no text goes on for ever with
# spaces. A schema may say otherwise under "x-guidance".
JSON_DEFAULTS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
JSON_ALWAYS: Any = {"lenient": False}  # what cannot be held is refused
# Without \\u there is one way to write each name.
ONE_SPELLING: Any = {"json_allowed_escapes": 'nrbtf\\\\"'}


def library_source(grammar: Grammar) -> str:
    """Raises InputError."""
    field = grammar.kind.field
    size = len(grammar.source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InputError(field, f"{size} bytes, at most {MAX_GRAMMAR_BYTES}")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = _read_schema(field, grammar.source)
            _check([(field, schema)])
            return json_source(schema)
        case GrammarKind.REGEX:
            if size > MAX_REGEX_BYTES:
                raise InputError(field, f"{size} bytes, at most {MAX_REGEX_BYTES}")
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICES:
            return LLMatcher.grammar_from_lark(_choices(grammar))
        case GrammarKind.CONTEXT_FREE:
            return LLMatcher.grammar_from_lark(_lark(grammar))


def schemas(grammar: Grammar) -> list[tuple[str, Any]]:
    """JSON schemas in it, each with its field: after the rule that it is of."""
    field = grammar.kind.field
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return [(field, json.loads(grammar.source))]
    if grammar.kind is GrammarKind.CONTEXT_FREE:
        return [
            (f"{field}.{each.rule}" if each.rule else field, each.schema)
            for each in lark_schemas(grammar.source)
        ]
    return []


def json_source(schema: Any) -> str:
    always = JSON_ALWAYS | (ONE_SPELLING if names_may_be_escaped(schema) else {})
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), JSON_DEFAULTS, always)


def _read_schema(field: str, source: str) -> Any:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InputError(field, f"is no JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InputError(field, "must be an object, or true")
    return schema


def _check(found: list[tuple[str, Any]]) -> None:
    used: set[int] = set()
    for field, schema in found:
        try:
            check_bounds(schema, used)
        except Excess as excess:
            raise InputError(field + excess.place, excess.problem) from None
        except RecursionError:
            raise InputError(field, "its references lead too deep") from None


def _choices(grammar: Grammar) -> str:
    """One terminal: the parser keeps 2,000 ways to go on, and there may be more choices."""
    field, texts = grammar.kind.field, json.loads(grammar.source)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InputError(field, f"must have 1 to {MAX_CHOICES} texts, has {len(texts)}")
    for i, text in enumerate(texts):
        if len(text) > MAX_TEXT:
            raise InputError(f"{field}[{i}]", f"{len(text)} characters, at most {MAX_TEXT}")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)


def _lark(grammar: Grammar) -> str:
    field, source = grammar.kind.field, grammar.source
    _check(schemas(grammar))
    if excess := "" if is_lark_syntax(source) else gbnf_excess(source):
        raise InputError(field, excess)
    try:
        lark = any_to_lark(source)
    except Exception as error:
        raise InputError(field, f"is neither Lark nor GBNF: {error}") from None
    if excess := lark_excess(lark):
        raise InputError(field, excess)
    return with_schemas(lark, _with_options)


def _with_options(schema: Any) -> Any:
    """The schema itself, where it needs none of ours."""
    if not isinstance(schema, Mapping):
        return schema
    given = schema.get("x-guidance", {})
    always = JSON_ALWAYS if "x-guidance" in schema else {}
    always = always | (ONE_SPELLING if names_may_be_escaped(schema) else {})
    if not isinstance(given, Mapping) or not always:
        return schema
    return {**schema, "x-guidance": {**given, **always}}
