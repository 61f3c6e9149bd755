"""/openapi.json is valid, and describes what is accepted and what comes back."""

import json
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from ssd_gateway.config import GatewayConfig
from ssd_gateway.routes.openapi import description
from tests.gateway.callers import ask
from tests.processes import GatewayProcess

MESSAGES = [{"role": "user", "content": "Tell me of a hen."}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def answer_schema(path: str, method: str, status: int) -> dict[str, Any]:
    described = description()
    answer = described["paths"][path][method]["responses"][str(status)]
    if "$ref" in answer:
        answer = described["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    schema = answer["content"]["application/json"]["schema"]
    return {**schema, "components": described["components"]}


def accepts(kind: str, body: Any, config: GatewayConfig | None = None) -> bool:
    components = description(config)["components"]
    checked = {"$ref": f"#/components/schemas/{kind}", "components": components}
    return bool(jsonschema.Draft202012Validator(checked).is_valid(body))


@pytest.mark.parametrize("config", [GatewayConfig(), GatewayConfig(allow_unknown_fields=True)])
def test_it_is_valid(config: GatewayConfig) -> None:
    validate(description(config))


def test_it_is_served(gateway: GatewayProcess) -> None:
    assert json.load(ask(gateway, "/openapi.json")) == description()


def test_the_queries_of_a_timeline_are_there() -> None:
    timeline = description()["paths"]["/ssd/timeline"]["get"]["parameters"]
    assert {each["name"] for each in timeline} == {"target", "sequence", "seconds"}


def test_keys_are_needed_where_there_is_a_token_file(tmp_path: Any) -> None:
    assert {} in description()["security"]
    guarded = description(GatewayConfig(token_file=tmp_path / "tokens.toml"))
    assert guarded["security"] == [{"key": []}]
    assert guarded["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert guarded["paths"]["/health"]["get"]["security"] == []


def test_requests_have_the_fields_that_are_accepted() -> None:
    chat = {"messages": MESSAGES, "temperature": 0.5, "store": False, "echo": None}
    assert accepts("ChatRequest", chat)
    for wrong in ({"store": True}, {"echo": True}, {"beam_width": 4}):
        assert not accepts("ChatRequest", {**chat, **wrong})
    assert not accepts("CompletionRequest", {"prompt": "Once", "n": 0})
    assert accepts(
        "ChatRequest", {**chat, "beam_width": 4}, GatewayConfig(allow_unknown_fields=True)
    )


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}, 200),
        (CHAT, {"messages": MESSAGES, "max_tokens": 4, "return_token_ids": True, "stop": " "}, 200),
        (COMPLETION, {"prompt": "Once", "logprobs": 2, "echo": True, "max_tokens": 4}, 200),
        (
            COMPLETION,
            {"prompt": "Once", "return_token_origins": True, "max_tokens": 4, "n": 2},
            200,
        ),
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}, 200),
        ("/detokenize", {"tokens": [5]}, 200),
        ("/v1/models", None, 200),
        ("/v1/models/{model}", None, 200),
        ("/version", None, 200),
        (CHAT, {"messages": []}, 400),
        (CHAT, {"messages": MESSAGES, "model": "gpt-5"}, 404),
        (COMPLETION, {"prompt": "x" * 5_000_000}, 413),
        ("/detokenize", {}, 400),
    ],
)
def test_answers_are_as_described(
    gateway: GatewayProcess, path: str, body: Any, status: int
) -> None:
    answer = ask(gateway, path.replace("{model}", "stories-target"), body)
    assert answer.status == status
    method = "get" if body is None else "post"
    jsonschema.validate(json.load(answer), answer_schema(path, method, status))
