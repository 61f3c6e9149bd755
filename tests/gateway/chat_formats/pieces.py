"""Texts cut into pieces, and the message that a parser makes of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.message import MessageDelta


def cuts(text: str) -> Iterator[list[str]]:
    """The text whole, in two pieces by every cut, and character by character."""
    yield [text]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    yield list(text)


def message_of(parser: ChatParser, pieces: Sequence[str]) -> dict[str, Any]:
    """What is told of all pieces together; a call's name must come before its arguments."""
    deltas = [pushed(parser, piece) for piece in pieces]
    last = MessageDelta()
    parser.finish(last)
    calls: list[list[str]] = []
    for call in (call for delta in [*deltas, last] for call in delta.calls):
        if call.name is not None:
            assert call.id is not None
            assert call.index == len(calls)
            calls.append([call.name, ""])
        assert call.index == len(calls) - 1
        calls[call.index][1] += call.arguments
    return {
        "reasoning": "".join(delta.reasoning for delta in [*deltas, last]),
        "content": "".join(delta.content for delta in [*deltas, last]),
        "calls": [tuple(call) for call in calls],
    }


def pushed(parser: ChatParser, piece: str) -> MessageDelta:
    message = MessageDelta()
    parser.push(piece, message)
    return message


def message_however_cut(make: Callable[[], ChatParser], text: str) -> dict[str, Any]:
    """The message of a text, which is the same for every cut."""
    whole = message_of(make(), [text])
    for pieces in cuts(text):
        assert message_of(make(), pieces) == whole, pieces
    return whole
