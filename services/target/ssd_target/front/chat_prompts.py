"""Reads the chat of a request: its messages, as fields or as JSON, and how they are rendered.

Texts in parts become one string, a line for each part: templates that take strings are served, and
those that go through parts take strings, too.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf import struct_pb2

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.text.chats import ChatOptions

MAX_ROLE_BYTES = 64
MAX_CHAT_MESSAGES = 4096
MAX_TEMPLATE_KWARGS_BYTES = 16384
MAX_JSON_DEPTH = 32  # of a message
MAX_JSON_VALUES = 1 << 17  # of all messages: each costs a little time, however short it is
MAX_JSON_SYNTAX_BYTES = 1 << 18  # of messages in JSON, beyond what their texts may have
MAX_TOOLS = 1024
MESSAGES, JSON, TOOLS = "chat.messages", "chat.messages_json", "chat.tools_json"


@dataclass(frozen=True)
class ParsedChat:
    messages: list[dict[str, Any]]
    names: dict[str, Any]  # further ones that the chat template may know
    options: ChatOptions
    tools: list[dict[str, Any]]  # for the template to name

    @property
    def num_text_bytes(self) -> int:
        """All that may come into the prompt, roles aside."""
        return _text_bytes(self.tools) + sum(
            _text_bytes(value)
            for message in self.messages
            for key, value in message.items()
            if key != "role"
        )


def parse_chat(chat: pb.ChatPrompt) -> ParsedChat:
    if chat.messages and chat.messages_json:
        raise InputError(JSON, f"is in place of {MESSAGES}: only one of them can be given")
    if chat.messages_json:
        field, messages = JSON, _json_messages(chat.messages_json)
    else:
        field, messages = MESSAGES, _plain_messages(chat)
    options = _options(chat, field)
    if options.continue_final_message and not isinstance(messages[-1].get("content"), str):
        raise InputError(
            f"{field}[{len(messages) - 1}].content",
            "must be a text: the last message is to be continued (chat.continue_final_message)",
        )
    tools = _json_tools(chat.tools_json) if chat.tools_json else []
    return ParsedChat(messages, _template_kwargs(chat.template_kwargs), options, tools)


def _options(chat: pb.ChatPrompt, field: str) -> ChatOptions:
    continues = chat.continue_final_message
    opens = chat.add_generation_prompt
    if not chat.HasField("add_generation_prompt"):
        opens = not continues
    if opens and continues:
        raise InputError(
            "chat.continue_final_message",
            "cannot be together with chat.add_generation_prompt, which begins another message",
        )
    return ChatOptions(opens, continues, field)


def _plain_messages(chat: pb.ChatPrompt) -> list[dict[str, Any]]:
    _check_count(MESSAGES, len(chat.messages))
    for i, message in enumerate(chat.messages):
        _check_role(f"{MESSAGES}[{i}]", message.role)
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _check_count(field: str, count: int) -> None:
    if not count:
        raise InputError(field, "is empty: at least one message is needed")
    if count > MAX_CHAT_MESSAGES:
        raise InputError(field, f"at most {MAX_CHAT_MESSAGES}, got {count}")


def _check_role(place: str, role: Any) -> None:
    if not isinstance(role, str) or not 1 <= len(role.encode()) <= MAX_ROLE_BYTES:
        raise InputError(
            f"{place}.role", f"must have 1 to {MAX_ROLE_BYTES} bytes: system, user or assistant"
        )


# Messages and tools in JSON


def _json_messages(data: bytes) -> list[dict[str, Any]]:
    messages = _json_list(JSON, "message", data)
    _check_count(JSON, len(messages))
    return [_json_message(f"{JSON}[{i}]", message) for i, message in enumerate(messages)]


def _json_tools(data: bytes) -> list[dict[str, Any]]:
    tools = _json_list(TOOLS, "tool", data)
    if len(tools) > MAX_TOOLS:
        raise InputError(TOOLS, f"at most {MAX_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InputError(f"{TOOLS}[{i}]", "must be an object")
    return tools


def _json_list(field: str, kind: str, data: bytes) -> list[Any]:
    """What is listed, each of which is of this kind, is not too deep, and all of it not too
    much."""
    try:
        listed = msgspec.json.decode(data)
    except RecursionError:
        raise InputError(field, f"at most {MAX_JSON_DEPTH} levels in a {kind}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(field, f"is no JSON: {error}") from None
    if not isinstance(listed, list):
        raise InputError(field, f"must be a list of {kind}s")
    counts = (_num_values(f"{field}[{i}]", each, kind) for i, each in enumerate(listed))
    if sum(counts) > MAX_JSON_VALUES:
        raise InputError(field, f"at most {MAX_JSON_VALUES} values, lists and objects")
    return listed


def _json_message(place: str, message: Any) -> dict[str, Any]:
    """All but its content is as it was."""
    if not isinstance(message, dict):
        raise InputError(place, "must be an object with a role")
    _check_role(place, message.get("role"))
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": _joined(f"{place}.content", content)}
    if not isinstance(content, str | None):
        raise InputError(f"{place}.content", "must be a string, null or a list of parts")
    return message


def _joined(place: str, parts: list[Any]) -> str:
    return "\n".join(_text_part(f"{place}[{i}]", part) for i, part in enumerate(parts))


def _text_part(place: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InputError(place, 'must be an object: {"type": "text", "text": …}')
    if part.get("type") != "text":
        named = str(part.get("type"))[:MAX_ROLE_BYTES]
        raise InputError(f"{place}.type", f"only text is served here, got {named!r}")
    if not isinstance(part.get("text"), str):
        raise InputError(f"{place}.text", "must be a string")
    return str(part["text"])


def _num_values(place: str, value: Any, kind: str, levels: int = MAX_JSON_DEPTH) -> int:
    """The value and those in it; ``levels`` may be there, that of the value included."""
    if not isinstance(value, list | dict):
        return 1
    if not levels:
        raise InputError(place, f"at most {MAX_JSON_DEPTH} levels in a {kind}")
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(_num_values(place, each, kind, levels - 1) for each in inner)


def _text_bytes(value: Any) -> int:
    match value:
        case str():
            return len(value.encode())
        case list():
            return sum(map(_text_bytes, value))
        case dict():
            return sum(_text_bytes(key) + _text_bytes(each) for key, each in value.items())
    return 0


# Names for the template


def _template_kwargs(given: struct_pb2.Struct) -> dict[str, Any]:
    if given.ByteSize() > MAX_TEMPLATE_KWARGS_BYTES:
        raise InputError("chat.template_kwargs", f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes")
    return {name: _plain(value) for name, value in given.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    """Whole numbers come as such: JSON tells them from others, the message does not."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return {name: _plain(each) for name, each in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None
