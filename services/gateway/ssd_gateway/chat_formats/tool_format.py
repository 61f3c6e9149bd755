"""What is special about a format of calls: its tags, and what parses it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ssd_gateway.chat_formats.call_parser import CallParser


@dataclass(frozen=True)
class ToolFormat:
    parser: Callable[[Collection[str]], CallParser]  # of the names that may be called
    arguments: str  # the key of a call's arguments
    before: str
    after: str
    separator: str  # of calls
    trigger: str  # a text that has come to this goes on with calls alone
    text: str  # the regular expression of answers without calls, but for the trigger
