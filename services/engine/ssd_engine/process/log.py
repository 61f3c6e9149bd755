"""Logging with role and rank, the same in every process: lines for people, or JSON for machines."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NoReturn

from ssd_engine.process.log_stream import QueuedStream

FORMATS = ("text", "json")
LAST_SECONDS = 2.0  # for what is unwritten when a process ends
log = logging.getLogger(__name__)

# What every record has; all else was given as ``extra`` and is a field of its own.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def setup_logging(
    role: str, level: str = "info", rank: int | None = None, log_format: str = "text"
) -> None:
    """One line per record on stderr, e.g. ``12:00:01.123 INFO target/1 loaded 8.9M parameters``,
    or one JSON object. Warnings and uncaught exceptions are records, too.

    Nobody who logs waits for the reader of stderr, nor does anybody else who writes there."""
    # Before gRPC is imported: its core would write, and wait, by itself, whenever a stranger's
    # handshake fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    own = sys.__stderr__
    if own is not None and sys.stderr is own:  # nobody else catches it, nor have we before
        sys.stderr = QueuedStream(own)
    handler = _Handler(sys.stderr)
    handler.setFormatter((JsonLines if log_format == "json" else TextLines)(role, rank))
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.lost_line = lambda lost: handler.format(_lost(lost)) + handler.terminator
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


class _Handler(logging.StreamHandler[Any]):
    def close(self) -> None:
        """The last thing that happens to it, when the process ends."""
        drain()
        super().close()


def _lost(number: int) -> logging.LogRecord:
    about = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
    text = f"{number} records before this one are lost: nobody read the log"
    return logging.makeLogRecord({**about, "msg": text, "lost": number})


def drain() -> None:
    """Let what was logged be written, within a bounded time."""
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.drain(LAST_SECONDS)


def end_process(code: int) -> NoReturn:
    """At once and from any thread, but for what was logged."""
    drain()
    os._exit(code)


class TextLines(logging.Formatter):
    """A record as a line. What would drive the reader's terminal, or hide or reorder text, is
    escaped."""

    def __init__(self, role: str, rank: int | None) -> None:
        name = role if rank is None else f"{role}/{rank}"
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s {name} %(message)s", datefmt="%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return "".join(map(_escaped, super().format(record)))


def _escaped(character: str) -> str:
    if character.isprintable() or character in "\n\t":  # a traceback has lines
        return character
    return character.encode("unicode_escape").decode("ascii")


class JsonLines(logging.Formatter):
    """A record as one JSON object on one line; what is not known is left out."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__()
        self._about = {"role": role} if rank is None else {"role": role, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            **self._about,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def is_structured() -> bool:
    """Whether this process logs JSON: then a last word to the operator is a record, too."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        log.critical("uncaught exception", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        about = (args.exc_type, args.exc_value, args.exc_traceback)
        log.critical("uncaught exception in a thread", exc_info=about)


@contextmanager
def uncaught_logged() -> Iterator[None]:
    """Around the whole of a child process: multiprocessing would print what it does not catch."""
    try:
        yield
    except Exception:
        log.critical("uncaught exception", exc_info=True)
        end_process(1)
