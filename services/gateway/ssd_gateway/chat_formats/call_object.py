"""The object of one call as it grows: {"name": …, "arguments": {…}}, in any order."""

import json
from collections.abc import Callable, Collection

from ssd_gateway.chat_formats.json_value import WHITESPACE, BrokenJson, JsonValue
from ssd_gateway.chat_formats.message import MessageDelta

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # that some models write, too
MAX_WORD = 1024  # characters of a key, or of a name


class CallObject:
    """Push characters, and tell what is new of the call: nothing until it is sure that this is one.
    ``text`` is all of it, for the case that it turns out to be none."""

    def __init__(self, index: int, names: Collection[str]) -> None:
        """``names``: tools that may be called."""
        self.is_told = self.is_over = False
        self._index, self._names = index, names
        self._text: list[str] = []  # until it is told
        self._name: str | None = None
        self._arguments: list[str] | None = None  # as far as they are there and not told
        self._word: list[str] = []  # a key, or the name
        self._key, self._value = "", JsonValue()
        self._step: Callable[[str], None] = self._open

    @property
    def text(self) -> str:
        return "".join(self._text)

    def push(self, char: str) -> None:
        """Raises BrokenJson where no call goes on with the character, which is not taken then."""
        self._step(char)
        if not self.is_told:
            self._text.append(char)

    def tell(self, message: MessageDelta) -> None:
        if self._name is None or self._arguments is None:
            return
        if not self.is_told:
            message.begin_call(self._index, self._name)
            self.is_told = True
        if self._arguments:
            message.add_arguments(self._index, "".join(self._arguments))
            self._arguments = []

    # Members of the object

    def _open(self, char: str) -> None:
        if char != "{":
            raise BrokenJson
        self._step = self._before_key

    def _before_key(self, char: str) -> None:
        if char in WHITESPACE:
            return
        if char != '"':
            raise BrokenJson
        self._word, self._value, self._step = [], JsonValue(), self._in_key
        self._in_key(char)

    def _in_key(self, char: str) -> None:
        self._value.push(char)
        self._extend_word(char)
        if self._value.is_over:
            self._key = self._checked_key(json.loads("".join(self._word)))
            self._step = self._colon

    def _extend_word(self, char: str) -> None:
        if len(self._word) == MAX_WORD:
            raise BrokenJson
        self._word.append(char)

    def _checked_key(self, key: str) -> str:
        again = (key == "name" and self._name is not None) or (
            key in ARGUMENTS and self._arguments is not None
        )
        if again or key not in ("name", *ARGUMENTS, *OTHERS):
            raise BrokenJson
        return key

    def _colon(self, char: str) -> None:
        if char == ":":
            self._word, self._value, self._step = [], JsonValue(), self._before_value
        elif char not in WHITESPACE:
            raise BrokenJson

    def _before_value(self, char: str) -> None:
        if char in WHITESPACE:
            return
        needed = '"' if self._key == "name" else "{" if self._key in ARGUMENTS else char
        if char != needed:
            raise BrokenJson
        if self._key in ARGUMENTS:
            self._arguments = []
        self._step = self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        taken = self._value.push(char)
        if self._key == "name":
            self._extend_word(char)
        elif self._arguments is not None and self._key in ARGUMENTS:
            self._arguments.append(char)
        if self._value.is_over:
            self._end_member()
            if not taken:
                self._after(char)

    def _end_member(self) -> None:
        if self._key == "name":
            name = json.loads("".join(self._word))
            if name not in self._names:
                raise BrokenJson
            self._name = name
        self._step = self._after

    def _after(self, char: str) -> None:
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            if self._name is None or self._arguments is None:
                raise BrokenJson
            self.is_over = True
        elif char not in WHITESPACE:
            raise BrokenJson
