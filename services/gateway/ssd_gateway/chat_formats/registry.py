"""Formats of calls by the names that targets and operators have for them."""

from ssd_gateway.chat_formats.hermes import HERMES
from ssd_gateway.chat_formats.llama3 import LLAMA3
from ssd_gateway.chat_formats.tool_format import ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {"hermes": HERMES, "llama3": LLAMA3}
