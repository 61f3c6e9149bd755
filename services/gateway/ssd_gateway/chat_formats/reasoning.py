"""Thoughts of a model: what is between <think> and </think> at the beginning of its answer."""

from enum import Enum

from ssd_gateway.chat_formats.message import MessageDelta

BEGIN, END = "<think>", "</think>"


class Thinking(Enum):
    """How an answer may begin."""

    NEVER = "without thoughts"
    MAYBE = "with <think>, or without thoughts"
    INSIDE = "within thoughts"


def is_open(text: str) -> bool:
    """Whether a text ends within thoughts."""
    return text.rfind(BEGIN) > text.rfind(END)


class ReasoningParser:
    """Splits a text that comes in pieces into thoughts and the rest. Tags, and line feeds beside
    them, are neither."""

    def __init__(self, thinking: Thinking) -> None:
        self._held = ""  # what may belong to a tag
        self._begins_inside = thinking is Thinking.INSIDE
        self._step = self._behind if thinking is Thinking.NEVER else self._before

    def push(self, text: str, message: MessageDelta) -> str:
        """Thoughts go into the message; the rest of the text is returned."""
        text, self._held = self._held + text, ""
        return self._step(text, message)

    def finish(self, message: MessageDelta) -> str:
        """The text has ended: what was held back was no tag."""
        held, self._held = self._held, ""
        if self._step == self._before and not self._begins_inside:
            return held
        message.add_reasoning(held.rstrip("\n"))
        return ""

    # Each step takes all that is there, and returns what is behind the thoughts.

    def _before(self, text: str, message: MessageDelta) -> str:
        start = text.lstrip()
        if start.startswith(BEGIN):
            return self._opened(start.removeprefix(BEGIN), message)
        if BEGIN.startswith(start):
            self._held = text
            return ""
        return self._opened(text, message) if self._begins_inside else self._behind(text, message)

    def _opened(self, text: str, message: MessageDelta) -> str:
        self._step = self._opened
        text = text.lstrip("\n")
        return self._inside(text, message) if text else ""

    def _inside(self, text: str, message: MessageDelta) -> str:
        self._step = self._inside
        thought, tag, rest = text.partition(END)
        if not tag:
            longest = min(len(text), len(END) - 1)
            held = next((k for k in range(longest, 0, -1) if END.startswith(text[-k:])), 0)
            thought = text[: len(text) - held]
        told = thought.rstrip("\n")
        message.add_reasoning(told)
        if not tag:
            self._held = text[len(told) :]
        return self._closed(rest, message) if tag else ""

    def _closed(self, text: str, message: MessageDelta) -> str:
        self._step = self._closed
        text = text.lstrip("\n")
        return self._behind(text, message) if text else ""

    def _behind(self, text: str, message: MessageDelta) -> str:
        self._step = self._behind
        return text
