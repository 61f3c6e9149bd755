"""/openapi.json is valid, and describes what is accepted and what comes back."""

import re
from typing import Any

import httpx2
import jsonschema
import pytest
from openapi_spec_validator import validate

from ssd_gateway.config import GatewayConfig
from ssd_gateway.routes.openapi import description
from tests.processes import GatewayProcess

MESSAGES = [{"role": "user", "content": "Tell me of a hen."}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def schema(of: dict[str, Any]) -> dict[str, Any]:
    """One that stands alone."""
    return {**of, "components": description()["components"]}


def answer_schema(path: str, method: str, status: int) -> dict[str, Any]:
    described = description()
    answer = described["paths"][path][method]["responses"][str(status)]
    if "$ref" in answer:
        answer = described["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    return schema(answer["content"]["application/json"]["schema"])


def accepts(kind: str, body: Any, config: GatewayConfig | None = None) -> bool:
    components = description(config)["components"]
    checked = {"$ref": f"#/components/schemas/{kind}", "components": components}
    return bool(jsonschema.Draft202012Validator(checked).is_valid(body))


@pytest.mark.parametrize("config", [GatewayConfig(), GatewayConfig(allow_unknown_fields=True)])
def test_it_is_valid(config: GatewayConfig) -> None:
    validate(description(config))


def test_it_is_served(gateway: GatewayProcess) -> None:
    assert httpx2.get(gateway.url + "/openapi.json").json() == description()


def test_all_parameters_of_paths_and_queries_are_there() -> None:
    for path, operations in description()["paths"].items():
        for operation in operations.values():
            named = {
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"
            }
            assert named == set(re.findall(r"{(\w+)}", path))
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
    assert not accepts("ChatRequest", {**chat, "store": True})
    assert not accepts("ChatRequest", {**chat, "echo": True})
    assert not accepts("ChatRequest", {**chat, "beam_width": 4})
    assert not accepts("CompletionRequest", {"prompt": "Once", "n": 0})
    assert accepts(
        "ChatRequest", {**chat, "beam_width": 4}, GatewayConfig(allow_unknown_fields=True)
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 4, "return_token_ids": True, "stop": " "}),
        (COMPLETION, {"prompt": "Once", "logprobs": 2, "echo": True, "max_tokens": 4}),
        (COMPLETION, {"prompt": "Once", "return_token_origins": True, "max_tokens": 4, "n": 2}),
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/models", None),
        ("/v1/models/{model}", None),
        ("/version", None),
    ],
)
def test_answers_are_as_described(gateway: GatewayProcess, path: str, body: Any) -> None:
    url = gateway.url + path.replace("{model}", "stories-target")
    answer = httpx2.get(url) if body is None else httpx2.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    method = "get" if body is None else "post"
    jsonschema.validate(answer.json(), answer_schema(path, method, 200))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": []}, 400),
        (CHAT, {"messages": MESSAGES, "model": "gpt-5"}, 404),
        (COMPLETION, {"prompt": "x" * 5_000_000}, 413),
        ("/detokenize", {}, 400),
    ],
)
def test_errors_are_as_described(
    gateway: GatewayProcess, path: str, body: Any, status: int
) -> None:
    answer = httpx2.post(gateway.url + path, json=body, timeout=60)
    assert answer.status_code == status
    jsonschema.validate(answer.json(), answer_schema(path, "post", status))
