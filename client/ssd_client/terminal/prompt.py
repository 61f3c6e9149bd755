"""Where the prompt comes from: exactly one of argument, file, standard input and token ids."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ssd_client.errors import BadInputError
from ssd_client.generate.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt

LOCAL_DEFAULT = "Tell me a story about a shy lamb who learns to sing."
_NO_PROMPT = "no prompt: give PROMPT, --prompt-file or --token-ids, or pipe it in"


@dataclass(frozen=True)
class PromptFlags:
    prompt: str | None = None
    prompt_file: str | None = None  # "-" is standard input
    token_ids: tuple[int, ...] | None = None
    chat: bool = False
    system: str | None = None
    local: bool = False


def read_prompt(flags: PromptFlags) -> Prompt:
    """The prompt that the flags name; BadInputError where they name none or too many."""
    _check(flags)
    if flags.token_ids is not None:
        return TokenPrompt(flags.token_ids)
    if flags.prompt is not None:
        return _as_asked(flags, flags.prompt)
    if flags.prompt_file is not None:
        return _as_asked(flags, _read_file(flags.prompt_file))
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_stdin()
    if piped:
        return _as_asked(flags, piped)
    if flags.local:
        return ChatPrompt((("user", LOCAL_DEFAULT),))
    raise BadInputError(_NO_PROMPT)


def _check(flags: PromptFlags) -> None:
    given = {
        "PROMPT": flags.prompt,
        "--prompt-file": flags.prompt_file,
        "--token-ids": flags.token_ids,
    }
    sources = [name for name, value in given.items() if value is not None]
    if len(sources) > 1:
        raise BadInputError(f"one prompt only, got {' and '.join(sources)}")
    if flags.token_ids is not None and flags.chat:
        raise BadInputError("--chat needs a prompt of text, got --token-ids")
    if flags.system is not None and not flags.chat:
        raise BadInputError("--system needs --chat")


def _as_asked(flags: PromptFlags, text: str) -> Prompt:
    if not flags.chat:
        return TextPrompt(text)
    system = (("system", flags.system),) if flags.system is not None else ()
    return ChatPrompt((*system, ("user", text)))


def _read_file(path: str) -> str:
    if path == "-":
        return _read_stdin()
    try:
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise BadInputError(f"--prompt-file {path}: {error.strerror}") from error


def _read_stdin() -> str:
    return decode(sys.stdin.buffer.read(), "standard input")


def decode(data: bytes, source: str) -> str:
    """Exactly the text of `data`: no newline is added, changed or taken away."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{source}: not valid UTF-8 at byte {error.start}") from error
