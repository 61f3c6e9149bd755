"""A message as it grows: thoughts, content and calls of tools."""

from dataclasses import dataclass, field
from secrets import token_hex


@dataclass(slots=True)
class CallDelta:
    """What is new of a call: its id and name come first, then its arguments, as JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What is new of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.calls)

    def begin_call(self, index: int, name: str) -> None:
        self.calls.append(CallDelta(index, f"call_{token_hex(12)}", name))

    def add_arguments(self, index: int, text: str) -> None:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        self.calls[-1].arguments += text
