"""The processes that render chats: quick ones, where each chat has a first budget of milliseconds,
and a patient one for whoever asks for more.

What a template makes of a chat may take time that grows with the square of its length. So whoever
renders chats of many callers tries with the first budget, and lets what has no end within it wait
for its turn at the patient one, which also leaves the processor to others.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ssd_engine.errors import SSDError
from ssd_engine.text.confined.process import ConfinedProcess, QuestionUnfinished

MODULE = "ssd_engine.text.confined.chat_templates"
MEMORY, SECONDS = 1 << 30, 2
QUICK = 2
FIRST_BUDGET = 0.02  # seconds of processor time
NICE = 5


class TakesLong(SSDError):
    """The chat is not rendered within its first budget."""


class ChatRenderers:
    """Several threads may use it."""

    def __init__(self, memory: int = MEMORY, seconds: int = SECONDS) -> None:
        """The limits of each process, as ``ConfinedProcess`` has them."""
        self._patient = ConfinedProcess(MODULE, memory, seconds, NICE)
        self._quick = [ConfinedProcess(MODULE, memory, seconds) for _ in range(QUICK)]
        self._idle: queue.LifoQueue[ConfinedProcess] = queue.LifoQueue()
        for each in self._quick:
            self._idle.put(each)
        self._thread = threading.local()

    def ask(self, question: Mapping[str, Any]) -> str:
        """Asks a quick process, or the patient one where this thread is ``patiently`` at it."""
        if getattr(self._thread, "is_patient", False):
            return self._patient.ask(question)
        if getattr(self._thread, "has_first_budget", False):
            question = {**question, "seconds": FIRST_BUDGET}
        process = self._idle.get()
        try:
            return process.ask(question)
        except QuestionUnfinished:
            raise TakesLong("the chat is not rendered within its first budget") from None
        finally:
            self._idle.put(process)

    @contextmanager
    def first_budget(self) -> Iterator[None]:
        """Raises TakesLong for a chat that this thread cannot render within its first budget."""
        self._thread.has_first_budget = True
        try:
            yield
        finally:
            self._thread.has_first_budget = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """What this thread asks is for the patient process, which starts with the first chat that
        needs it."""
        self._thread.is_patient = True
        try:
            yield
        finally:
            self._thread.is_patient = False

    def close(self) -> None:
        for each in (self._patient, *self._quick):
            each.close()
