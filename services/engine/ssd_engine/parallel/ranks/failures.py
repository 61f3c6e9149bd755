"""What happens when a rank dies: all others end, too, with its reason in the log."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection

from ssd_engine.errors import EXIT_RANK_DIED
from ssd_engine.parallel.cluster.wire import NodeConnectionBroken
from ssd_engine.process.fork_server import ForkedProcess
from ssd_engine.process.log import end_process

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0


@contextmanager
def await_failure_report(at_once: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """A collective, a pipe or a connection fails the moment a rank dies. The watcher knows which
    one, says so, and ends this process. ``at_once``: errors that follow from no rank's death."""
    try:
        yield
    except at_once:
        raise
    except (RuntimeError, OSError, EOFError, NodeConnectionBroken):
        time.sleep(REPORT_SECONDS)
        raise


def _tell_nobody(reason: str) -> None:
    pass


def watch_ranks(ranks: list[ForkedProcess], tell: Callable[[str], None] = _tell_nobody) -> None:
    threading.Thread(target=_end_with_first, args=(ranks, tell), daemon=True).start()


def _end_with_first(ranks: list[ForkedProcess], tell: Callable[[str], None]) -> None:
    reason = first_death(ranks)
    log.critical("%s; the engine stops", reason)
    tell(reason)
    end_process(EXIT_RANK_DIED)


def first_death(ranks: list[ForkedProcess]) -> str:
    """Waits until a rank dies, and says which."""
    ended = connection.wait([rank.sentinel for rank in ranks])
    dead = next(rank for rank in ranks if rank.sentinel in ended)
    dead.join()
    return f"{dead.name} died with exit code {dead.exitcode}"
