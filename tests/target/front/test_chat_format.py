"""A chat template tells how its model writes calls of tools and thoughts."""

from functools import cache
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import ChatTemplate, Tokenizer
from ssd_target.front.chat_format import find_chat_format, tools_of

SHIPPED = resolve_model("stories-target")
SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
# What is particular about the templates of some families.
QWEN = """{{- '\\n<tool_call>\\n{\\"name\\": \\"' + call.name + '\\", \\"arguments\\": ' }}"""
QWEN_CODER = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
GLM = "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>"
LLAMA_3_1 = """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_3_2 = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""


@cache
def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(SHIPPED, load_model_config(SHIPPED), ChatTemplate(Path("x"), template))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        (LLAMA_3_1, "llama3"),
        (LLAMA_3_2, "llama3"),
        (QWEN_CODER, ""),
        (GLM, ""),
        ("{{ tool.parameters }} parameters: {{ name }}", ""),
        (SAID, ""),
        ("", ""),
    ],
)
def test_calls_of_tools(template: str, expected: str) -> None:
    assert tools_of(template) == expected


@pytest.mark.parametrize(
    ("template", "thinks", "begins"),
    [
        (SAID, False, False),
        (SAID + "{{ content.split('</think>')[-1] if content }}", True, False),
        (SAID + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}", True, True),
        (SAID + "{{ '<think>\\n\\n</think>\\n\\n' }}", True, False),
        (SAID + "{{ raise_exception('a system message, please') }}<think>", True, False),
    ],
)
def test_thoughts(template: str, thinks: bool, begins: bool) -> None:
    expected = pb.ChatFormat(thinks=thinks, begins_thinking=begins)
    assert find_chat_format(tokenizer(template)) == expected


def test_a_model_without_a_template_has_no_format() -> None:
    assert find_chat_format(tokenizer("")) == pb.ChatFormat()
