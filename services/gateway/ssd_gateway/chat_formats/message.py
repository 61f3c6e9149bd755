"""A message as it grows: thoughts, content and calls of tools."""

from dataclasses import dataclass, field
from secrets import token_hex


@dataclass(slots=True)
class CallDelta:
    """What is new of a call: its id and name come first, then its arguments, as JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class MessageDelta:
    """What is new of a message. Texts are kept in pieces: there may be very many."""

    def __init__(self) -> None:
        self.calls: list[CallDelta] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not (self._reasoning or self._content or self.calls)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    def add_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        if text:
            self._content.append(text)

    def drop_content(self) -> None:
        self._content.clear()

    def begin_call(self, index: int, name: str) -> None:
        self.calls.append(CallDelta(index, f"call_{token_hex(12)}", name))

    def add_arguments(self, index: int, text: str) -> None:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        self.calls[-1].pieces.append(text)
