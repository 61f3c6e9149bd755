"""How the answers of a chat are to be read, by its fields and by the format of its model."""

from ssd.v1 import target_pb2 as pb
from ssd_gateway.chat_formats.chat_reading import ChatReading
from ssd_gateway.chat_formats.reasoning import Thinking, is_open
from ssd_gateway.openai.fields import ChatRequest
from ssd_gateway.openai.structured_output import NamedGrammar
from ssd_gateway.openai.tools import ToolUse


def reading_of(
    fields: ChatRequest, form: pb.ChatFormat, use: ToolUse | None, own: NamedGrammar | None
) -> ChatReading:
    """``own``: the grammar of an answer. One that cannot be a part of another is that of the whole
    text, and leaves no room for thoughts."""
    thinks = form.thinks and (own is None or own.answer is not None)
    return ChatReading(
        thinking=_thinking(fields, form.begins_thinking) if thinks else Thinking.NEVER,
        by_prompt=thinks and _has_options(fields) and not fields.continue_final_message,
        tools=None if use is None else use.form,
        names=() if use is None else use.names,
        must_call=use is not None and use.must_call,
    )


def _has_options(fields: ChatRequest) -> bool:
    """Whether the template is told anything that may open or close thoughts in the prompt."""
    return bool(fields.chat_template_kwargs) or fields.reasoning_effort is not None


def _thinking(fields: ChatRequest, begins_thinking: bool) -> Thinking:
    if fields.continue_final_message:
        opened = is_open(str(fields.messages[-1].get("content")))
        return Thinking.INSIDE if opened else Thinking.NEVER
    options = fields.chat_template_kwargs or {}
    silent = False in (options.get("enable_thinking"), options.get("thinking"))
    return Thinking.INSIDE if begins_thinking and not silent else Thinking.MAYBE
