"""Headers that go on to targets: what is not valid ends no request, and every answer has an id."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from ssd_gateway.http.request_headers import traceparent_of
from tests.gateway.callers import ask
from tests.processes import GatewayProcess

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("told", "valid"),
    [
        (VALID, True),
        (f"cc-{TRACE}-{PARENT}-01-what-is-to-come", True),
        ("\xe9", False),
        ("", False),
        (VALID.upper(), False),
        (VALID + "-more", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"cc-{TRACE}-{PARENT}-01-\xe9", False),
        (f"cc-{TRACE}-{PARENT}-01-{'a' * 999}", False),
    ],
)
def test_a_traceparent_that_is_not_valid_is_none(told: str, valid: bool) -> None:
    headers = [(b"traceparent", told.encode("latin-1"))]
    assert traceparent_of(Request({"type": "http", "headers": headers})) == (
        told if valid else None
    )


@pytest.mark.parametrize("told", ["\xe9", "00-\xff", VALID])
def test_no_traceparent_ends_a_request(gateway: GatewayProcess, told: str) -> None:
    body = {"prompt": "Once", "max_tokens": 1}
    answer = ask(gateway, "/v1/completions", body, {"traceparent": told})
    assert answer.status == 200, answer.read()


@pytest.mark.parametrize("key", ["Bearer \xe9", "\xff", "Bearer a\tkey"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize"])
def test_a_key_beyond_printable_ascii_is_refused(
    gateway: GatewayProcess, key: str, path: str
) -> None:
    """Also where no key is needed."""
    body = None if path == "/v1/models" else {"prompt": "Once"}
    answer = ask(gateway, path, body, {"authorization": key})
    assert answer.status == 401
    assert json.load(answer)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        ("/health", None),
        ("/nowhere", None),
        ("/v1/completions", {"prompt": "Once", "beam_width": 4}),
        ("/v1/completions", {"prompt": "Once", "temperature": -1}),
        ("/detokenize", {"tokens": [2**31]}),
    ],
)
def test_every_answer_has_the_request_s_id(gateway: GatewayProcess, path: str, body: Any) -> None:
    own, *made_up = (
        ask(gateway, path, body, {"x-request-id": told}).headers["x-request-id"]
        for told in ("hen-1", "\xe9", "\xe9")
    )
    assert own == "hen-1"
    assert all(each.isalnum() for each in made_up)
    assert made_up[0] != made_up[1]
