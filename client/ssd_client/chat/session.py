"""A conversation: what was said, how the next reply is made, and what replies came to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ssd_client.errors import count
from ssd_client.generate.request import ChatPrompt
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult
from ssd_client.generate.speculation import MODES, SpeculationStats
from ssd_client.terminal.params import parse_number

HELP = """\
/reset           forget what was said
/system [TEXT]   the system message from now on; without TEXT, none (forgets what was said)
/temp X          temperature of the next replies
/seed [N]        seed of the next replies; without N, a new one each time
/mode MODE       ssd, sync or off, the server's own: auto
/stats           what all replies came to
/save FILE       write what was said there, as JSON messages
/quit            end the chat (also Ctrl-D); Ctrl-C stops a reply"""


class Quit(Exception):
    """The user wants to leave."""


@dataclass
class Session:
    options: RequestOptions
    system: str | None = None
    messages: list[tuple[str, str]] = field(default_factory=list)  # (role, content)
    replies: int = 0
    tokens: int = 0
    seconds: float = 0.0  # after the first tokens
    origins: Counter[str] = field(default_factory=Counter)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def prompt(self, said: str) -> ChatPrompt:
        return ChatPrompt((*self._system(), *self.messages, ("user", said)))

    def said(self, end: int | None = None) -> list[dict[str, str]]:
        """The messages up to `end`, after the system's, as other tools write them."""
        whole = (*self._system(), *self.messages[:end])
        return [{"role": role, "content": text} for role, text in whole]

    def _system(self) -> list[tuple[str, str]]:
        return [("system", self.system)] if self.system is not None else []

    def replied(self, said: str, result: GenerationResult) -> None:
        """A reply that was stopped counts, too: what was heard of it was said."""
        self.messages += [("user", said), ("assistant", result.text)]
        self.replies += 1
        self.tokens += len(result.token_ids)
        self.origins.update(result.origins)
        timing = result.timing
        if timing.first_token is not None and timing.last_token is not None:
            self.seconds += timing.last_token - timing.first_token
        if result.speculation is not None:
            self.speculation += result.speculation

    def obey(self, line: str) -> str:
        """Follows a command; returns what to say about it; a ValueError says what is wrong."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "reset":
                self.messages.clear()
                return "forgotten"
            case "system":
                self.system = rest or None
                self.messages.clear()
                return f"system: {rest}" if rest else "no system message"
            case "temp" | "temperature":
                return self._set(temperature=_temperature(rest))
            case "seed":
                return self._set(seed=_seed(rest))
            case "mode":
                return self._set(mode=_mode(rest))
            case "stats":
                return self.statistics()
            case "save":
                return self._save(rest)
            case "help" | "?":
                return HELP
            case "quit" | "exit" | "q":
                raise Quit
        raise ValueError(f"/{name} is not known\n{HELP}")

    def _set(self, **changed: float | int | str | None) -> str:
        self.options = {**self.options, **changed}  # type: ignore[typeddict-item]
        ((name, value),) = changed.items()
        return f"{name}: {'the server decides' if value is None else value}"

    def _save(self, name: str) -> str:
        """Saves a list of messages, which other tools read, too; overwrites nothing."""
        if not name:
            raise ValueError("/save: the name of a file is needed")
        path = Path(name).expanduser()
        said = self.said()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(said, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except OSError as error:
            raise ValueError(f"/save {path}: {error.strerror}") from error
        return f"saved: {path}, {count(len(said), 'message')}"

    def statistics(self) -> str:
        after_first, hit_rate = max(0, self.tokens - self.replies), self.speculation.hit_rate
        counted = ((self.origins[name], title) for name, title in ORIGINS.items())
        parts = (
            f"{self.replies} replies",
            f"{self.tokens} tokens",
            f"{after_first / self.seconds:.1f} tokens/s" if self.seconds else "",
            *(f"{number} {title}" for number, title in counted if number),
            "" if hit_rate is None else f"hit rate {hit_rate:.0%}",
        )
        return " · ".join(part for part in parts if part)


ORIGINS = {
    "target": "by the target alone",
    "cache": "from the cache",
    "just_in_time": "just in time",
    "ngram": "by n-gram",
    "sync": "in turns",
    "grammar": "by the grammar",
}


def _temperature(text: str) -> float:
    value = parse_number(text)
    if value < 0:
        raise ValueError(f"/temp: 0 or more is needed, got {text}")
    return value


def _seed(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**64:
        raise ValueError(f"/seed: a whole number below 2^64 is needed, got {text!r}")
    return int(text)


def _mode(text: str) -> str | None:
    if text in MODES:
        return text
    if text == "auto":
        return None
    raise ValueError(f"/mode: {', '.join(MODES)} or auto is needed, got {text!r}")
