"""Fields for what a text must be become grammars, or are refused by name."""

import json
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.errors import BadInputError
from ssd_gateway.http.errors import api_error
from tests.gateway.openai.test_openai_tools import request, tool
from tests.gateway.openai.test_translation import chat, completion, refused

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "$defs": {"é": True}}
NO_JSON = ["{", '{"const": NaN}', '{"const": "\\ud800"}', '{"a": 1e400}']
NAMED = {"name": "person", "schema": SCHEMA, "strict": True, "description": "Who it is."}


def asked(**content: Any) -> pb.Grammar:
    """The grammar of a chat, and of a completion."""
    (one,), (other,) = chat(**content).requests, completion(**content).requests
    assert one.grammar == other.grammar
    return one.grammar


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"regex": None}])
def test_without_them_a_text_is_free(given: dict[str, Any]) -> None:
    assert not chat(**given).requests[0].HasField("grammar")


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "json_object": False}}, SCHEMA),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ],
)
def test_schemas(given: dict[str, Any], schema: dict[str, Any]) -> None:
    assert json.loads(asked(**given).json_schema) == schema


def test_a_schema_that_is_true_is_one_that_is_empty() -> None:
    told = [
        request(
            response_format={"type": "json_schema", "json_schema": {"schema": schema}}, tools=tools
        ).grammar
        for tools in ([], [tool()])
        for schema in (True, {})
    ]
    alone, empty, beside, empty_beside = told
    assert alone == empty
    assert beside == empty_beside
    assert "answer: %json" in beside.context_free


def test_other_rules() -> None:
    assert asked(structured_outputs={"regex": "a+"}).regex == asked(regex="a+").regex == "a+"
    lark = 'start: "a"'
    assert asked(structured_outputs={"grammar": lark}).context_free == lark
    assert asked(ebnf=lark).context_free == lark
    assert list(asked(structured_outputs={"choice": ["a", "b"]}).choices.texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": NAMED}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        *(({"structured_outputs": {"json": text}}, "structured_outputs.json") for text in NO_JSON),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refused(chat, **given) == refused(completion, **given) == param


def test_two_of_them_are_refused_by_both_names() -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert refused(chat, **both) == "structured_outputs.regex"
    assert refused(completion, regex="a", ebnf="b") == "ebnf"


def told(field: str, params: dict[str, str]) -> tuple[int, str | None, str]:
    """A target's error about a field, as its caller gets it."""
    error = BadInputError(f"{field}: is no type")
    error.status, error.field = grpc.StatusCode.INVALID_ARGUMENT, field
    problem = api_error(error, params)
    return problem.status, problem.param, str(problem)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ],
)
def test_a_target_s_error_names_the_caller_s_field(given: dict[str, Any], place: str) -> None:
    for translated in (chat(**given), completion(**given)):
        theirs, ours = "grammar.json_schema.properties.age.type", f"{place}.properties.age.type"
        assert told(theirs, translated.params) == (400, ours, f"{ours}: is no type")


def test_an_error_in_the_eleventh_tool_is_its_own() -> None:
    params = {f"grammar.context_free.arguments_{i}": f"tools[{i}]" for i in range(12)}
    _, param, _ = told("grammar.context_free.arguments_10/properties", params)
    assert param == "tools[10]/properties"
