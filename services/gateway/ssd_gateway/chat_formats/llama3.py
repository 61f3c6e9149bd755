"""Calls as Llama 3 writes them: {"name": …, "parameters": {…}}, in place of text."""

from ssd_gateway.chat_formats.call_parser import CallParser
from ssd_gateway.chat_formats.tool_format import ToolFormat


class Llama3Parser(CallParser):
    begin, between, is_bare = "<|python_tag|>", (";",), True


LLAMA3 = ToolFormat(
    parser=Llama3Parser,
    arguments="parameters",
    before="",
    after="",
    separator="; ",
    trigger="<|python_tag|>",
    text=r"[ \t\r\n]*([^{ \t\r\n](?s:.*))?",  # an answer that begins with { is a call
)
