"""Compiles grammars for the tokens of one model, by llguidance.

llguidance was chosen over xgrammar. It needs nothing else installed, compiles a schema in a
millisecond, holds bounds on the work of every step, and refuses what it cannot hold a text to.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ssd_engine.errors import InputError
from ssd_engine.grammar.deep_stack import call_on_deep_stack
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.json_schemas.errors import find_place
from ssd_engine.grammar.sources import json_source, library_source, schemas
from ssd_engine.grammar.spec import Grammar, GrammarKind

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
# What compiled ones that are kept took to compile, together: a second's worth is up to 100 MiB.
MOST_IDLE_SECONDS = 1.0
PANIC = "PanicException"  # of the library's bindings; it is no Exception
ROW_BOUND = "Current row has"  # more ways to go on than the parser keeps
NO_TEXT = "no text is described by it"
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

Made = TypeVar("Made")


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
                if _may_be_kept(idle):
                    self._idle.append((known, idle))
            self._drop_oldest()
            for i, (known, idle) in enumerate(self._idle):
                if known == grammar:
                    del self._idle[i]
                    return idle
        return None

    def _compiled(self, grammar: Grammar) -> "_Idle":
        return self._on_deep_stack(grammar, self._tried)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return self._on_deep_stack(grammar, self._checked_matcher)

    def _on_deep_stack(self, grammar: Grammar, make: Callable[[Grammar], Made]) -> Made:
        """Raises InputError, whatever the library raises: nobody ends by a grammar."""
        _ = self._tokenizer  # which is not a matter of this grammar
        try:
            return call_on_deep_stack(partial(make, grammar))
        except InputError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise InputError(grammar.kind.field, _plain(str(error))) from None

    def _tried(self, grammar: Grammar) -> "_Idle":
        begin = time.thread_time()  # however busy the machine is
        matcher = self._checked_matcher(grammar)
        if ROW_BOUND in (problem := _problem_after(matcher)):  # no text can get around it
            raise self._refusal(grammar, problem)
        if matcher.is_error():  # for the text that was tried; another may go on
            matcher = self._checked_matcher(grammar)
        return _Idle(matcher, time.thread_time() - begin)

    def _checked_matcher(self, grammar: Grammar) -> LLMatcher:
        matcher = self._matcher(library_source(grammar))
        if problem := _first_problem(matcher):
            raise self._refusal(grammar, problem)
        return matcher

    def _drop_oldest(self) -> None:
        del self._idle[:-MOST_IDLE]
        seconds = sum(idle.seconds for _, idle in self._idle)
        while seconds > MOST_IDLE_SECONDS:
            seconds -= self._idle.pop(0)[1].seconds

    def _matcher(self, source: str) -> LLMatcher:
        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def _refusal(self, grammar: Grammar, problem: str) -> InputError:
        for field, schema in schemas(grammar):
            whole = grammar.kind is GrammarKind.JSON_SCHEMA
            if wrong := problem if whole else self._schema_problem(schema):
                place, problem = find_place(schema, wrong, self._schema_problem)
                return InputError(field + place, problem)
        return InputError(grammar.kind.field, problem)

    def _schema_problem(self, schema: object) -> str:
        try:
            return _first_problem(self._matcher(json_source(schema)))
        except (ValueError, RecursionError) as error:
            return _plain(str(error))


def _may_be_kept(idle: _Idle) -> bool:
    slow = idle.seconds >= RENEWED_SECONDS
    return not slow and not idle.matcher.is_error() and bool(idle.matcher.reset())


def _first_problem(matcher: LLMatcher) -> str:
    """The first mask is computed as well: the first step would have to wait for it."""
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return _plain(matcher.get_error())
    return "" if any(allowed) else NO_TEXT


def _problem_after(matcher: LLMatcher) -> str:
    """What is wrong where the first token can be chosen. The library looks at the bounds of a place
    when it leaves it."""
    if forced := matcher.compute_ff_tokens():
        matcher.try_consume_tokens(forced)
    allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
    if (token := _lowest(allowed)) is not None:
        matcher.try_consume_tokens([token])
    if matcher.is_error() or not matcher.reset():
        return _plain(matcher.get_error())
    return ""


def _lowest(allowed: bytes) -> int | None:
    at = next((i for i, byte in enumerate(allowed) if byte), None)
    return None if at is None else at * 8 + (allowed[at] & -allowed[at]).bit_length() - 1


def _plain(problem: str) -> str:
    problem = problem.replace("<non-verbose/>", "").strip()
    if problem.startswith("NoExtension"):
        return NO_TEXT
    return problem or "cannot be compiled"
