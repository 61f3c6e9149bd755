"""What a chat shows: text as it comes, in the colours of where it came from if they are wanted."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console
from rich.text import Text

from ssd_client.chat.session import ORIGINS
from ssd_client.generate.events import Tokens
from ssd_client.printable import printable
from ssd_client.terminal import render
from ssd_client.terminal.render import write_stdout

STYLES = {
    "target": "white",
    "cache": "green",
    "just_in_time": "yellow",
    "ngram": "magenta",
    "sync": "cyan",
    "grammar": "blue",
}


class ChatScreen(Protocol):
    def show(self, tokens: Tokens) -> None: ...


class PlainScreen:
    def show(self, tokens: Tokens) -> None:
        if tokens.text:
            write_stdout(tokens.text)


class OriginScreen:
    """Each token in its colour."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

    @property
    def has_colour(self) -> bool:
        return self._console.color_system is not None

    def legend(self, notes: Console) -> None:
        if not self.has_colour:
            render.note(notes, "no colours here: /stats counts where tokens came from")
            return
        parts = [(f" {title} ", STYLES[name]) for name, title in ORIGINS.items()]
        notes.print(Text.assemble("tokens: ", *parts))

    def show(self, tokens: Tokens) -> None:
        told = "".join(tokens.pieces) == tokens.text and len(tokens.origins) == len(tokens.pieces)
        if not self.has_colour or not told:  # an older server does not say it
            write_stdout(tokens.text)
            return
        for piece, origin in zip(tokens.pieces, tokens.origins, strict=False):
            if piece:
                text = Text(printable(piece), style=STYLES.get(origin, ""))
                self._console.print(text, end="")
        sys.stdout.flush()
