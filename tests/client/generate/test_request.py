"""What is put on the wire, and what is not."""

import pytest

from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import check_address
from ssd_client.errors import BadInputError
from ssd_client.generate.request import (
    ChatPrompt,
    TextPrompt,
    build_request,
    pack_token_ids,
    resume_request,
)
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.speculation import MODES, VERIFICATIONS
from tests.client.every_option import BY_PYTHON, on_the_wire


def test_nothing_but_the_prompt_is_sent_by_default():
    request = build_request(TextPrompt("Once"), RequestOptions())
    assert request == target_pb2.GenerateRequest(text="Once")
    assert [field.name for field, _ in request.ListFields()] == ["text"]


def test_values_equal_to_the_servers_defaults_are_sent_when_they_were_set():
    options = RequestOptions(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=0)
    request = build_request(TextPrompt("x"), options)
    present = {field.name for field, _ in request.sampling.ListFields()}
    assert present == {"temperature", "top_k", "top_p", "seed"}
    assert request.stop.HasField("max_tokens")


def test_names_for_the_chat_template_go_with_the_messages():
    names = {"enable_thinking": False, "budget": 5, "words": ["a", None]}
    chat, options = ChatPrompt((("user", "hi"),)), RequestOptions(chat_template_kwargs=names)
    sent = build_request(chat, options).chat.template_kwargs
    assert dict(sent.items())["enable_thinking"] is False
    assert [*sent["words"]] == ["a", None]
    assert sent["budget"] == 5


def test_every_option_has_its_field():
    assert build_request(TextPrompt("x"), BY_PYTHON) == on_the_wire()
    assert BY_PYTHON.keys() | GRAMMARS | {"chat_template_kwargs"} == set(
        RequestOptions.__annotations__
    )


GRAMMARS = {"json_schema", "regex", "choice", "grammar"}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        (RequestOptions(json_schema=SCHEMA), {"json_schema": '{"type": "object"}'}),
        (RequestOptions(json_schema='{"a": 1}'), {"json_schema": '{"a": 1}'}),
        (RequestOptions(regex="a+"), {"regex": "a+"}),
        (RequestOptions(choice=["a", "b"]), {"choices": {"texts": ["a", "b"]}}),
        (RequestOptions(grammar="start: A"), {"context_free": "start: A"}),
        (RequestOptions(choice=()), {}),
    ],
)
def test_a_grammar_has_its_rule(options, grammar):
    expected = target_pb2.GenerateRequest(text="x", grammar=grammar or None)
    assert build_request(TextPrompt("x"), options) == expected


def test_a_text_follows_one_grammar_alone():
    with pytest.raises(BadInputError, match="json_schema and regex"):
        build_request(TextPrompt("x"), RequestOptions(json_schema=SCHEMA, regex="a"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (RequestOptions(mode="off"), ["mode"]),
        (RequestOptions(draft=("h:1",)), ["endpoints"]),
        (RequestOptions(down_weight=0.0), ["down_weight"]),
    ],
)
def test_one_speculation_option_implies_no_other(options, names):
    request = build_request(TextPrompt("x"), options)
    assert [field.name for field, _ in request.speculation.ListFields()] == names


def test_every_mode_has_its_name():
    modes = [build_request(TextPrompt("x"), RequestOptions(mode=m)) for m in MODES]
    assert [each.speculation.mode for each in modes] == [3, 2, 1]
    assert set(MODES.values()) | {0} == set(target_pb2.SpeculationMode.values())
    assert set(VERIFICATIONS.values()) | {0} == set(target_pb2.VerificationMode.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 1e30), ("top_k", 10**30), ("seed", 2**64), ("temperature", 10**400)],
)
def test_a_number_that_cannot_be_sent_is_refused_by_name(name, value):
    with pytest.raises(BadInputError, match=f"^{name}: "):
        build_request(TextPrompt("x"), {name: value})


def test_a_resume_is_the_same_request_with_seed_and_tokens():
    request, expected = on_the_wire(), on_the_wire()
    resumed = resume_request(request, 77, [1, 2])
    assert request == on_the_wire()
    expected.sampling.seed = 77
    expected.generated_token_ids = b"\x01\0\0\0\x02\0\0\0"
    assert resumed == expected
    assert resume_request(resumed, 0, [3]).generated_token_ids == pack_token_ids([1, 2, 3])


def test_a_resume_asks_for_the_prompt_again_only_if_nothing_came_after_it():
    request = target_pb2.GenerateRequest(text="a", return_prompt=True)
    request.logprobs.prompt = True
    unchanged, resumed = (resume_request(request, 0, tokens) for tokens in ([], [5]))
    assert (unchanged.return_prompt, unchanged.logprobs.prompt) == (True, True)
    assert (resumed.return_prompt, resumed.logprobs.prompt) == (False, False)


@pytest.mark.parametrize("address", ["127.0.0.1:7410", "gpu-1.lan:1", "[::1]:65535"])
def test_addresses(address):
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "h:0", "h:65536", "::1:80", "h :1"])
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        check_address(address)
