"""Where a chat's lines come from: a terminal, with history and pastes that are one message, or a
pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ssd_client.terminal.prompt import decode

PROMPT = "> "
_KEPT = 1000  # lines that can be called back
Read = Callable[[], str]  # the next line; EOFError at the end


@contextlib.contextmanager
def lines(history: Path | None) -> Iterator[Read]:
    """`history`: where a terminal's lines are kept from one chat to the next; None: nowhere."""
    if not sys.stdin.isatty():
        yield _read_line
        return
    with _remembered(history):
        yield lambda: input(PROMPT)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ssd" / "chat_history"


@contextlib.contextmanager
def _remembered(history: Path | None) -> Iterator[None]:
    try:
        import readline
    except ImportError:  # a Python without it: lines cannot be called back
        yield
        return
    readline.set_history_length(_KEPT)
    # What is pasted arrives as it is, newlines included, until Enter is pressed.
    readline.parse_and_bind("set enable-bracketed-paste on")
    if history is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a home that cannot be written: nothing is lost but it
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def _read_line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decode(line, "standard input").rstrip("\n")
