"""How a model writes what is more than text, told by its chat template."""

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.text.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
# Other formats that have the tags of Hermes, with no JSON in them.
OTHERS = ("<function=", "<arg_key>")
TRIAL = ({"role": "user", "content": "x"},)


def find_chat_format(tokenizer: Tokenizer) -> pb.ChatFormat:
    template = tokenizer.chat_template
    thinks = BEGIN in template or END in template
    return pb.ChatFormat(
        tools=tools_of(tokenizer.tool_template),
        thinks=thinks,
        begins_thinking=thinks and _begins_thinking(tokenizer),
    )


def tools_of(template: str) -> str:
    """The format of calls; empty where the template has none that is known."""
    if "<tool_call>" in template:
        return "" if any(tag in template for tag in OTHERS) else "hermes"
    by_key = '"parameters": ' in template and '{"name": ' in template
    return "llama3" if by_key or "<|python_tag|>" in template else ""


def _begins_thinking(tokenizer: Tokenizer) -> bool:
    """Whether the template opens thoughts before the answer."""
    try:
        prompt = tokenizer.spell(tokenizer.encode_chat(TRIAL))
    except InputError:  # a template may refuse a lone message
        return False
    return prompt.rfind(BEGIN) > prompt.rfind(END)
