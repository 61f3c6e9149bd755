"""A service's side of a confined process: start it, ask it, start another one when it has ended.

Chat templates are programs, and the rules of a tokenizer are nearly that. Jinja's sandbox keeps a
template away from Python, but not from running for ever; and a library that reads the rules of a
tokenizer may end its process. Here they end a child at most, and the service says why.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from ssd_engine.process.children import terminal_signals_held_back
from ssd_engine.text.confined.answers import EXIT_MEMORY, MAX_ANSWER_BYTES, AnswerKind

# For an answer. Limits count the process's own time, of which it may get little.
PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 10.0  # from the end of its pipe to its own
# Threads reserve address space, which is what is limited.
SINGLE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class QuestionRefused(Exception):
    """The process answered that it cannot; says why."""


class QuestionsRefused(QuestionRefused):
    """The process cannot answer this question, nor any other of its kind."""


class QuestionUnfinished(Exception):
    """The budget that the question named is over."""


class ConfinedProcessEnded(Exception):
    """The process ended over the question: it took more than it may, or crashed."""


class ConfinedProcess:
    """Answers one question at a time. The first one starts it, and it ends with this process."""

    def __init__(self, module: str, memory: int, seconds: int, nice: int = 0) -> None:
        """``module``: run as a program, it answers questions. ``memory``: bytes that it may have;
        ``seconds``: of processor time, for each question; ``nice``: how much it leaves the
        processor to others."""
        self._module = module
        self._memory = memory
        self._seconds = seconds
        self._nice = nice
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def ask(self, question: Mapping[str, Any]) -> str:
        with self._lock:
            answer = self._exchange(json.dumps(question).encode())
        text = answer[1:].decode("utf-8", "surrogatepass")
        match AnswerKind(answer[:1]):
            case AnswerKind.BROKEN:
                raise QuestionsRefused(text)
            case AnswerKind.REFUSED:
                raise QuestionRefused(text)
            case AnswerKind.UNFINISHED:
                raise QuestionUnfinished
        return text

    def close(self) -> None:
        with self._lock:
            self._end()

    def _exchange(self, question: bytes) -> bytes:
        pipe = self._running()
        try:
            pipe.send_bytes(question)
            if pipe.poll(PATIENCE_SECONDS):
                return pipe.recv_bytes(MAX_ANSWER_BYTES)
        except (EOFError, OSError):
            pass
        raise ConfinedProcessEnded(self._reason(self._end()))

    def _reason(self, code: int | None) -> str:
        """``code``: its exit code. A library that gets no memory may abort."""
        if code == -signal.SIGXCPU:
            return f"it took more than {self._seconds} s of processor time"
        memory = f"took more than {self._memory >> 20} MiB of memory"
        return f"it {memory}" if code == EXIT_MEMORY else f"it crashed (code {code}), or {memory}"

    def _running(self) -> Connection:
        if self._pipe is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._process, self._pipe = self._start()
            atexit.register(self.close)
        return self._pipe

    def _start(self) -> tuple["subprocess.Popen[bytes]", Connection]:
        """Nothing is imported from the current directory, which may be the model's."""
        limits = map(str, (self._memory, self._seconds, self._nice))
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs, terminal_signals_held_back():
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, *limits],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **SINGLE_THREAD},
                )
                return process, Connection(ours.detach())
        except OSError as error:
            raise ConfinedProcessEnded(f"it cannot be started: {error.strerror}") from None

    def _end(self) -> int | None:
        """Returns the exit code of a process that had ended, or was about to, by itself."""
        atexit.unregister(self.close)
        if self._pipe is not None:
            self._pipe.close()
        process, self._process, self._pipe = self._process, None, None
        if process is None:
            return None
        try:
            return process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
