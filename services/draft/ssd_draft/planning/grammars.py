"""Compiles the grammars of sequences on a thread: an endpoint waits for none of them."""

from concurrent.futures import Future, ThreadPoolExecutor

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar

OPENING_SECONDS = 0.003  # most are compiled by then


class PendingGrammar:
    """A sequence is drafted for without its grammar until that is there: guesses are worse then,
    and nothing is wrong."""

    def __init__(self, compiled: "Future[GrammarFollower]") -> None:
        self._compiled = compiled

    def result(self, seconds: float = 0.0) -> GrammarFollower | None:
        try:
            return self._compiled.result(seconds)
        except (TimeoutError, InputError):  # not yet; or a target that knows more grammars
            return None


class GrammarThread:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler, self._pool = compiler, ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: Grammar) -> PendingGrammar:
        return PendingGrammar(self._pool.submit(self._compiler.follow, grammar))
