"""Requests with a grammar: they join the others as soon as it is compiled, on a thread beside."""

from concurrent.futures import Future, ThreadPoolExecutor, wait

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_target.records.engine_records import Submit

THREADS = 2  # one slow grammar does not hold up another
IDLE_SECONDS = 0.002  # for so long it is waited for where there is nothing else to do

Admitted = tuple[Submit, GrammarFollower | InputError]


class GrammarAdmission:
    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._pool: ThreadPoolExecutor | None = None  # once it is needed
        self._waiting: dict[int, tuple[Submit, Future[GrammarFollower]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, record: Submit) -> None:
        if self._compiler is None or record.sampling.grammar is None:
            raise RuntimeError("a request without a grammar, or an engine without a vocabulary")
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "grammars")
        compiled = self._pool.submit(self._compiler.follow, record.sampling.grammar)
        self._waiting[record.sequence] = record, compiled

    def cancel(self, sequence: int) -> None:
        """Does nothing for one that has joined the others."""
        self._waiting.pop(sequence, None)

    def take(self, idle: bool) -> list[Admitted]:
        """Those whose grammar is compiled, or cannot be. ``idle``: there is nothing else to do."""
        if idle and self._waiting:
            wait([each for _, each in self._waiting.values()], IDLE_SECONDS)
        done = [number for number, (_, each) in self._waiting.items() if each.done()]
        return [_result(*self._waiting.pop(number)) for number in done]

    def take_all(self) -> list[Submit]:
        """Those that wait, whatever becomes of their grammars."""
        waiting, self._waiting = self._waiting, {}
        return [record for record, _ in waiting.values()]


def _result(record: Submit, compiled: "Future[GrammarFollower]") -> Admitted:
    try:
        return record, compiled.result()
    except InputError as error:
        return record, error
