"""One JSON value, followed character by character: where it ends, and where it is broken."""

import re
from collections.abc import Callable

WHITESPACE = " \t\r\n"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("+-.eE0123456789")
LITERALS = {"t": "true", "f": "false", "n": "null"}
HEXADECIMAL = frozenset("0123456789abcdefABCDEF")


class BrokenJson(Exception):
    """No JSON goes on like this."""


Step = Callable[[str], None]


class JsonValue:
    """Push characters until ``is_over``. A number is over with the first character behind it,
    which is not taken."""

    def __init__(self) -> None:
        self.is_over = False
        self._closing: list[str] = []  # brackets that are open
        self._word: list[str] = []  # a number, a literal, or what follows \\u
        self._is_key = False
        self._step: Step = self._value

    def push(self, char: str) -> bool:
        """Returns whether the character is a part of the value; raises BrokenJson."""
        self._step(char)
        return not (self.is_over and self._step == self._number)

    def _value(self, char: str) -> None:
        if char in WHITESPACE:
            return
        if char in "{[":
            self._closing.append("}" if char == "{" else "]")
            self._step = self._first_key if char == "{" else self._first_item
        elif char == '"':
            self._is_key, self._step = False, self._string
        elif char == "-" or char in "0123456789":
            self._word, self._step = [char], self._number
        elif char in LITERALS:
            self._word, self._step = [char], self._literal
        else:
            raise BrokenJson

    def _first_item(self, char: str) -> None:
        self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> None:
        self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> None:
        if char == '"':
            self._is_key, self._step = True, self._string
        elif char not in WHITESPACE:
            raise BrokenJson

    def _string(self, char: str) -> None:
        if char == '"':
            if self._is_key:
                self._step = self._colon
            else:
                self._end_value()
        elif char == "\\":
            self._step = self._escape
        elif char < " ":
            raise BrokenJson

    def _colon(self, char: str) -> None:
        if char == ":":
            self._step = self._value
        elif char not in WHITESPACE:
            raise BrokenJson

    def _escape(self, char: str) -> None:
        if char == "u":
            self._word, self._step = [], self._unicode
        elif char in '"\\/bfnrt':
            self._step = self._string
        else:
            raise BrokenJson

    def _unicode(self, char: str) -> None:
        if char not in HEXADECIMAL:
            raise BrokenJson
        self._word.append(char)
        if len(self._word) == 4:
            self._step = self._string

    def _literal(self, char: str) -> None:
        self._word.append(char)
        word, whole = "".join(self._word), LITERALS[self._word[0]]
        if not whole.startswith(word):
            raise BrokenJson
        if word == whole:
            self._end_value()

    def _number(self, char: str) -> None:
        if char in NUMBER_CHARACTERS:
            self._word.append(char)
            return
        if NUMBER.fullmatch("".join(self._word)) is None:
            raise BrokenJson
        if self._closing:
            self._step = self._after
            self._after(char)
        else:
            self.is_over = True

    def _end_value(self) -> None:
        self.is_over = not self._closing
        self._step = self._after

    def _after(self, char: str) -> None:
        if char == ",":
            self._step = self._key if self._closing[-1] == "}" else self._value
        elif char in "}]":
            self._close(char)
        elif char not in WHITESPACE:
            raise BrokenJson

    def _close(self, char: str) -> None:
        if self._closing.pop() != char:
            raise BrokenJson
        self._end_value()
