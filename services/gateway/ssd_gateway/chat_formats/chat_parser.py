"""The text of an answer as a message: thoughts first, then content and calls."""

from ssd_gateway.chat_formats.call_parser import CallParser
from ssd_gateway.chat_formats.message import MessageDelta
from ssd_gateway.chat_formats.reasoning import ReasoningParser


class ChatParser:
    def __init__(
        self, reasoning: ReasoningParser, calls: CallParser | None, must_call: bool = False
    ) -> None:
        """``calls``: None where the request has no tools. ``must_call``: there is no content, and
        what looks like some is a call that was cut."""
        self._reasoning, self._calls, self._must_call = reasoning, calls, must_call

    @property
    def has_called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_calling(self) -> bool:
        """Within a call that has no end yet."""
        return self._calls is not None and self._calls.is_calling

    def push(self, text: str, message: MessageDelta) -> None:
        self._push_answer(self._reasoning.push(text, message), message)

    def finish(self, message: MessageDelta) -> None:
        """The text has ended with this message: what was held back is told."""
        self._push_answer(self._reasoning.finish(message), message)
        if self._calls is not None:
            self._calls.finish(message)
        if self._must_call:
            message.drop_content()

    def _push_answer(self, text: str, message: MessageDelta) -> None:
        if self._calls is None:
            message.add_content(text)
        else:
            self._calls.push(text, message)
        if self._must_call:
            message.drop_content()
