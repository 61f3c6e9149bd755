"""Finds calls of tools in a text that comes in pieces, whatever tags a format puts around them."""

from collections.abc import Callable, Collection

from ssd_gateway.chat_formats.call_object import CallObject
from ssd_gateway.chat_formats.json_value import WHITESPACE, BrokenJson
from ssd_gateway.chat_formats.message import MessageDelta

BLOCK = 256  # characters at a time, so that a long text takes no longer than its length


class CallParser:
    """Content up to the first call stays content, and so does whatever looks like a call and is
    none. How the text is cut into pieces changes nothing of the message."""

    begin: str  # the tag before an object; its first character is nowhere else in it
    between: tuple[str, ...]  # what may follow an object, beside whitespace, and is no content
    is_bare: bool  # a text may begin with an object, without a tag, and an object follow another

    def __init__(self, names: Collection[str]) -> None:
        """``names``: tools that may be called."""
        self.num_calls = 0  # that were begun
        self.is_calling = False  # the last of them has no end yet
        self._names = names
        self._held = ""  # what may belong to a call
        self._tag = ""  # its end, where a tag has begun after a call
        self._call = CallObject(0, names)
        self._step: Callable[[str, MessageDelta], str] = (
            self._at_start if self.is_bare else self._in_content
        )

    def push(self, text: str, message: MessageDelta) -> None:
        for begin in range(0, len(text), BLOCK):
            block = text[begin : begin + BLOCK]
            while block:
                block = self._step(block, message)

    def finish(self, message: MessageDelta) -> None:
        """The text has ended: what was held back, and was no call, is content."""
        if self._step == self._in_object and not self._call.is_told:
            self._held += self._call.text
        elif self._step == self._after_call and _may_become(self._tag, self.between):
            self._held = ""
        if not self.is_calling:
            message.add_content(self._held)
        self._held = ""

    # Each step takes what it can of a text, and returns the rest.

    def _at_start(self, text: str, message: MessageDelta) -> str:
        rest = text.lstrip(WHITESPACE)
        self._held += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._begin_object()
        elif rest:
            self._give_up(message)
        return rest

    def _in_content(self, text: str, message: MessageDelta) -> str:
        if not self._held:
            before, self._held, rest = text.partition(self.begin[0])
            message.add_content(before)
            return rest
        if not self.begin.startswith(self._held + text[0]):
            self._give_up(message)
            return text
        self._held += text[0]
        if self._held == self.begin:
            self._step = self._before_object
        return text[1:]

    def _before_object(self, text: str, message: MessageDelta) -> str:
        rest = text.lstrip(WHITESPACE)
        self._held += text[: len(text) - len(rest)]
        if rest:
            self._begin_object()
        return rest

    def _begin_object(self) -> None:
        self._call, self._step = CallObject(self.num_calls, self._names), self._in_object

    def _in_object(self, text: str, message: MessageDelta) -> str:
        call, place, is_broken = self._call, 0, False
        while place < len(text) and not call.is_over and not is_broken:
            try:
                call.push(text[place])
                place += 1
            except BrokenJson:
                is_broken = True
        self._tell(message)
        if is_broken:
            self._held = "" if call.is_told else self._held + call.text
            self._give_up(message)
        elif call.is_over:
            self._held, self.is_calling, self._step = "", False, self._after_call
        return text[place:]

    def _tell(self, message: MessageDelta) -> None:
        self._call.tell(message)
        if self._call.is_told and not self.is_calling:
            self.num_calls, self.is_calling = self.num_calls + 1, True

    def _after_call(self, text: str, message: MessageDelta) -> str:
        """Whitespace and tags between calls are dropped, unless content follows them."""
        if not self._tag:
            rest = text.lstrip(WHITESPACE)
            self._held += text[: len(text) - len(rest)]
            if not rest:
                return ""
            text = rest
        tag = self._tag + text[0]
        if self.is_bare and tag == "{":
            self._begin_object()
            return text
        if not _may_become(tag, (*self.between, self.begin)):
            self._give_up(message)
            return text
        self._held, self._tag = self._held + text[0], tag
        if tag == self.begin:
            self._step, self._tag = self._before_object, ""
        elif tag in self.between:
            self._held = self._tag = ""
        return text[1:]

    def _give_up(self, message: MessageDelta) -> None:
        """What is held back is content, and what follows is looked at anew."""
        message.add_content(self._held)
        self._held, self._tag, self.is_calling = "", "", False
        self._step = self._in_content


def _may_become(text: str, tags: Collection[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)
