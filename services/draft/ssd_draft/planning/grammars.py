"""Compiles the grammars of sequences on a thread: an endpoint waits for none of them."""

import logging
import os
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar

OPENING_SECONDS = 0.003  # most are compiled by then
# Branches of a sequence are followed at the same time, where that takes little to prepare.
MOST_OTHERS = min(7, max(0, len(os.sched_getaffinity(0)) - 2))
QUICK_SECONDS = 0.02
MOST_LOGGED = 200  # characters of what is wrong with a grammar: it comes from outside

log = logging.getLogger(__name__)


class PendingGrammar:
    """A sequence is drafted for without its grammar until that is there: guesses are worse then,
    and nothing is wrong."""

    def __init__(self, compiled: "Future[GrammarFollower | None]") -> None:
        self._compiled = compiled

    def result(self, seconds: float = 0.0) -> GrammarFollower | None:
        """None: not yet, or never."""
        try:
            return self._compiled.result(seconds)
        except TimeoutError:
            return None


class GrammarThread:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler, self._pool = compiler, ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: Grammar) -> PendingGrammar:
        return PendingGrammar(self._pool.submit(self._compile, grammar))

    def _compile(self, grammar: Grammar) -> GrammarFollower | None:
        """None for one that cannot be compiled: a target may know more grammars."""
        begin = time.monotonic()
        try:
            follower = self._compiler.follow(grammar)
        except InputError as error:
            log.warning("Drafting without a grammar: %s", str(error)[:MOST_LOGGED])
            return None
        if time.monotonic() - begin < QUICK_SECONDS:
            self._pool.submit(self._add_another, weakref.ref(follower), grammar)
        return follower

    def _add_another(self, ref: "weakref.ref[GrammarFollower]", grammar: Grammar) -> None:
        """One at a time: a sequence that has just come does not wait for all of them."""
        follower = ref()
        if follower is None or len(follower.others) >= MOST_OTHERS:
            return
        begin = time.monotonic()
        follower.others.append(self._compiler.follow(grammar))
        if time.monotonic() - begin < QUICK_SECONDS:
            self._pool.submit(self._add_another, ref, grammar)
