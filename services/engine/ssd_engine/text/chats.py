"""How a chat is rendered, and where a last message that is left open ends in the rendered text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_engine.errors import InputError

# No string from the wire contains a lone surrogate, and no mark of a control token is this one.
END = "\udfff"


@dataclass(frozen=True)
class ChatOptions:
    """``continue_final_message``: nothing follows the text of the last message."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    field: str = "chat.messages"  # the field of the request that has the messages


ASSISTANT_NEXT = ChatOptions()


def with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with a mark after the text of the last; a template that trims the text takes
    the space behind the mark away."""
    *before, last = map(dict, messages)
    return [*before, {**last, "content": f"{last['content']}{END} "}]


def cut_at_end(rendered: str, content: str) -> str:
    """The rendered text up to the last mark in it, as transformers' ``continue_final_message`` has
    it: trimmed where the template trims. ``content``: that of the last message."""
    before, mark, after = rendered.rpartition(END)
    before = before.replace(f"{END} ", "").replace(END, "")  # a template may say it twice
    if not mark or content.strip() not in before:
        raise InputError(
            "chat.continue_final_message",
            "the chat template leaves the text of the last message out, or changes it",
        )
    return before if after.startswith(" ") else before.rstrip()
