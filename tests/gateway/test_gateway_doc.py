"""docs/gateway.md says what the gateway does."""

import re
from pathlib import Path

import msgspec
import pytest

from ssd_gateway.cli import serve
from ssd_gateway.config import GatewayConfig
from ssd_gateway.openai import messages, tools
from ssd_gateway.openai.fields import REFUSED, ChatRequest, CompletionRequest
from ssd_gateway.routes.openapi import description

TEXT = (Path(__file__).resolve().parents[2] / "docs/gateway.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_every_endpoint_is_named() -> None:
    paths = {f"{method.upper()} {path}" for path, has in description()["paths"].items()
             for method in has}  # fmt: skip
    others = {"GET /", "GET /openapi.json", "max_model_len", "--metrics-listen"}
    assert codes(section("Endpoints")) == paths | others


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_is_honoured_or_refused(kind: type[msgspec.Struct]) -> None:
    honoured, _, refused = section("Fields").partition("\n### ")[0].partition("Refused, unless")
    assert {field.encode_name for field in msgspec.structs.fields(kind)} <= codes(honoured)
    assert codes(refused) == REFUSED.keys() | {"--allow-unknown-fields"}


def test_what_changes_nothing_inside_messages_and_tools_is_named() -> None:
    """That it changes nothing is tested where messages and tools are translated."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*?)\|(.*?)\|(.*?)\|$", section("Fields"), re.MULTILINE)
    ignored = {place: codes(cell) for place, _, cell, _ in rows}
    used = {place: codes(cell) for place, cell, _, _ in rows}
    for told, known in (
        (ignored["messages[]"], messages.IGNORED),
        (ignored["messages[].tool_calls[]"], messages.IGNORED_OF_CALLS),
        (ignored["tools[]"], tools.IGNORED),
        (used["tools[]"], tools.ToolFields.__struct_fields__),
        (used["tools[].function"], tools.FunctionFields.__struct_fields__),
        (codes(rows[0][3]), messages.REFUSED),
    ):
        assert told == set(known)


def test_flags_exist_and_have_the_defaults_that_are_told() -> None:
    known = {flag for each in serve.params for flag in (*each.opts, *each.secondary_opts)}
    elsewhere = {"--local-model", "--local-draft", "--trace-events"}
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) <= known | elsewhere
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\d+)", section("Limits"), re.MULTILINE)
    assert len(rows) == 9
    for flag, default in rows:
        assert float(default) == getattr(GatewayConfig(), flag.replace("-", "_"))
