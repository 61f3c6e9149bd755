"""Headers that go on to targets: what is not valid ends no request, and every answer has an id."""

import http.client
import json
from typing import Any

import openai
import pytest
from starlette.requests import Request

from ssd_gateway.http.request_headers import traceparent_of
from tests.processes import GatewayProcess
from tests.waiting import HANG_SECONDS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{PARENT}-01"


def ask(
    front: GatewayProcess, path: str, headers: dict[str, str], body: Any = None
) -> http.client.HTTPResponse:
    host, _, port = front.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
    content = None if body is None else json.dumps(body)
    headers = {"content-type": "application/json", **headers}
    connection.request("GET" if body is None else "POST", path, content, headers)
    return connection.getresponse()


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
    answer = ask(gateway, "/v1/completions", {"traceparent": told}, body)
    assert answer.status == 200, answer.read()


@pytest.mark.parametrize("key", ["Bearer \xe9", "\xff", "Bearer a\tkey"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize"])
def test_a_key_beyond_printable_ascii_is_refused(
    gateway: GatewayProcess, key: str, path: str
) -> None:
    """Also where no key is needed."""
    body = None if path == "/v1/models" else {"prompt": "Once"}
    answer = ask(gateway, path, {"authorization": key}, body)
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
    assert ask(gateway, path, {"x-request-id": "hen-1"}, body).headers["x-request-id"] == "hen-1"
    told = [
        ask(gateway, path, {"x-request-id": "\xe9"}, body).headers["x-request-id"] for _ in "ab"
    ]
    assert all(each.isalnum() for each in told)
    assert told[0] != told[1]


def test_an_error_of_the_sdk_names_its_request(sdk: openai.OpenAI) -> None:
    for field in ("beam_width", "max_tokens"):
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.completions.create(
                model="stories-target",
                prompt="Once",
                extra_body={field: -1},
                extra_headers={"X-Request-Id": "hen-2"},
            )
        assert caught.value.request_id == "hen-2"
