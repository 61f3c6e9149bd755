"""Calls as Hermes and Qwen write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from ssd_gateway.chat_formats.call_parser import CallParser
from ssd_gateway.chat_formats.tool_format import ToolFormat


class HermesParser(CallParser):
    begin, between, is_bare = "<tool_call>", ("</tool_call>",), False


HERMES = ToolFormat(
    parser=HermesParser,
    arguments="arguments",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    text="(?s:.*)",
)
