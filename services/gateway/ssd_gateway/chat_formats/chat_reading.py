"""How the text of one request's answers is read: with thoughts, with calls, or as it is."""

from collections.abc import Collection
from dataclasses import dataclass

from ssd_gateway.chat_formats.chat_parser import ChatParser
from ssd_gateway.chat_formats.reasoning import BEGIN, ReasoningParser, Thinking
from ssd_gateway.chat_formats.tool_format import ToolFormat


@dataclass(frozen=True)
class ChatReading:
    thinking: Thinking = Thinking.NEVER
    by_prompt: bool = False  # the prompt's end tells whether an answer begins within thoughts
    tools: ToolFormat | None = None
    names: Collection[str] = ()  # of tools that may be called
    must_call: bool = False

    def parser(self, prompt: str) -> ChatParser:
        thinking = self.thinking
        if self.by_prompt:
            opened = prompt.rstrip().endswith(BEGIN)
            thinking = Thinking.INSIDE if opened else Thinking.MAYBE
        calls = None if self.tools is None else self.tools.parser(self.names)
        return ChatParser(ReasoningParser(thinking), calls, self.must_call)
