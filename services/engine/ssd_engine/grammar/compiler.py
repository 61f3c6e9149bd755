"""Compiles grammars for the tokens of one model, by llguidance.

llguidance was chosen over xgrammar. It needs nothing else installed, compiles a schema in a
millisecond, holds bounds on the work of every step, and refuses what it cannot hold a text to.
"""

import json
import re
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from ssd_engine.errors import InputError
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.schema_errors import find_large_number, find_place
from ssd_engine.grammar.spec import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MOST_IDLE = 64  # compiled grammars that are kept, those that were used last
# Tokens that lie within one of these are looked at together, wherever all of it may come: strings
# whose length is bounded need the shorter ones.
_INSIDE_STRINGS = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_INSIDE_STRINGS}{{1,{length}}}" for length in (2, 4, 6, 8, 10, 14, 20, 30)),
    f"{_INSIDE_STRINGS}+",
]
RENEWED_SECONDS = 0.1  # what took longer to compile is not compiled again in the midst of a text
MAX_CHOICES = 4096
# As json.dumps writes it: what need not be chosen takes no time, and no text goes on for ever with
# spaces. A schema may say otherwise under "x-guidance".
JSON_DEFAULTS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_JSON_RULE = re.compile(r"^(\w+): %json (\{.*\})$", re.MULTILINE)
JSON_ALWAYS: Any = {"lenient": False}  # what cannot be held is refused
# Work is counted in steps of the library: about 50,000 of the lexer's first ones and 15,000 of its
# later ones take a millisecond, and so do 20,000 items of the parser.
LIMITS: dict[str, Any] = dict(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=40_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class _Idle(NamedTuple):
    matcher: LLMatcher
    seconds: float  # that it took to compile


class GrammarCompiler:
    """Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokenizer``: what the tokenizers library reads one from. A text that must come is cut
        into tokens as it does it, and no other ones are allowed there."""
        self._serialized, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        # Compiled ones that no text follows. Each text has one of its own: copies of one wait for
        # each other, and one that has been used is faster.
        self._idle: list[tuple[Grammar, _Idle]] = []
        self._returned: deque[tuple[Grammar, _Idle]] = deque(maxlen=MOST_IDLE)
        self._lock = Lock()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made for the first grammar: of a large vocabulary it takes a second."""
        try:
            return LLTokenizer(
                self._serialized, n_vocab=self._vocab_size, eos_token=self._eos, slices=SLICES
            )
        except Exception as error:
            problem = f"this model's tokenizer is none that texts can be held to one with: {error}"
            raise InputError("grammar", problem) from None

    def follow(self, grammar: Grammar) -> GrammarFollower:
        """Raises InputError for a grammar that cannot be compiled."""
        idle = self._take(grammar) or self._compiled(grammar)  # nobody else waits for it
        quick = idle.seconds < RENEWED_SECONDS
        renew = partial(self._compile, grammar) if quick else None
        follower = GrammarFollower(idle.matcher, self._vocab_size, renew)
        weakref.finalize(follower, self._returned.append, (grammar, idle)).atexit = False
        return follower

    def _take(self, grammar: Grammar) -> "_Idle | None":
        """One that nothing follows a text with any longer."""
        with self._lock:
            while self._returned:  # what comes back comes at any time, on any thread
                known, idle = self._returned.popleft()
                if not idle.matcher.is_error() and idle.matcher.reset():
                    self._idle.append((known, idle))
            del self._idle[:-MOST_IDLE]
            for i, (known, idle) in enumerate(self._idle):
                if known == grammar:
                    del self._idle[i]
                    return idle
        return None

    def _compiled(self, grammar: Grammar) -> "_Idle":
        begin = time.monotonic()
        return _Idle(self._compile(grammar), time.monotonic() - begin)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        size = len(grammar.source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InputError(grammar.kind.field, f"{size} bytes, at most {MAX_GRAMMAR_BYTES}")
        matcher = self._matcher(_library_grammar(grammar))
        if matcher.is_error():
            raise self._refusal(grammar, matcher.get_error())
        matcher.compute_bitmask()  # what the first step would have to wait for
        if matcher.is_error():
            raise self._refusal(grammar, matcher.get_error())
        return matcher

    def _matcher(self, source: str) -> LLMatcher:
        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def _refusal(self, grammar: Grammar, problem: str) -> InputError:
        field = grammar.kind.field
        for rule, schema in _schemas(grammar):
            if wrong := problem if not rule else self._schema_problem(schema):
                place, problem = find_place(schema, wrong, self._schema_problem)
                field += rule + place
                break
        return InputError(field, problem.strip())

    def _schema_problem(self, schema: object) -> str:
        return self._matcher(_json_grammar(json.dumps(schema))).get_error()


def _schemas(grammar: Grammar) -> list[tuple[str, Any]]:
    """JSON schemas in it, each after the rule that it is of, which has a line to itself."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return [("", json.loads(grammar.source))]
    found = []
    if grammar.kind is GrammarKind.CONTEXT_FREE:
        for rule, text in _JSON_RULE.findall(grammar.source):
            with suppress(ValueError, RecursionError):
                found.append((f".{rule}", json.loads(text)))
    return found


def _library_grammar(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _checked_json_grammar(grammar)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICES:
            return LLMatcher.grammar_from_lark(_choices(grammar))
        case GrammarKind.CONTEXT_FREE:
            return LLMatcher.grammar_from_lark(_lark(grammar))


def _checked_json_grammar(grammar: Grammar) -> str:
    try:
        return _json_grammar(_checked_schema(grammar))
    except ValueError as error:  # the library's: too deep, or options of its own that are wrong
        raise InputError(grammar.kind.field, str(error)) from None


def _json_grammar(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, JSON_DEFAULTS, JSON_ALWAYS)


def _checked_schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InputError(grammar.kind.field, f"is no JSON: {error}") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise InputError(grammar.kind.field, "must be an object, or true")
    _check_numbers(grammar.kind.field, schema)
    return grammar.source


def _check_numbers(field: str, schema: Any) -> None:
    if (place := find_large_number(schema)) is not None:
        problem = "is beyond 2^53: texts cannot be held to a whole number as large as that"
        raise InputError(field + place, problem)


def _choices(grammar: Grammar) -> str:
    texts = json.loads(grammar.source)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InputError(
            grammar.kind.field, f"must have 1 to {MAX_CHOICES} texts, has {len(texts)}"
        )
    return "start: " + " | ".join(json.dumps(text) for text in texts)


def _lark(grammar: Grammar) -> str:
    for rule, schema in _schemas(grammar):
        _check_numbers(grammar.kind.field + rule, schema)
    try:
        return any_to_lark(grammar.source)
    except Exception as error:
        raise InputError(grammar.kind.field, f"is neither Lark nor GBNF: {error}") from None
