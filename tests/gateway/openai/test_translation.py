"""OpenAI's fields become a target's request: honoured, or refused by name."""

import json
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_gateway.http.errors import ApiError
from ssd_gateway.openai.fields import (
    EFFORTS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    SpeculationFields,
    StreamOptions,
    read_fields,
)
from ssd_gateway.openai.translation import (
    TranslatedRequest,
    seed_of_choice,
    translate_chat,
    translate_completion,
    unpack,
)
from tests.client.every_option import by_openai, on_the_wire

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def chat(**content: Any) -> TranslatedRequest:
    body = json.dumps({"messages": MESSAGES, **content}).encode()
    return translate_chat(read_fields(body, ChatRequest, False), "id")


def completion(**content: Any) -> TranslatedRequest:
    body = json.dumps({"prompt": "Once", **content}).encode()
    return translate_completion(read_fields(body, CompletionRequest, False), "id")


def refused(ask: Any, **content: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        ask(**content)
    assert caught.value.status == 400
    assert str(caught.value).startswith(caught.value.param or "")
    assert len(str(caught.value)) < 300
    return caught.value.param


def test_every_option_reaches_the_target() -> None:
    (request,) = completion(**by_openai()).requests
    expected = on_the_wire(openai=True)
    for part in ("sampling", "stop", "speculation", "request_id", "cache_salt"):
        assert getattr(request, part) == getattr(expected, part)
    assert (request.logprobs.chosen, request.logprobs.top_n) == (True, 2)


def test_what_is_not_said_is_left_to_the_target() -> None:
    (request,) = chat().requests
    request.sampling.ClearField("seed")
    assert request.sampling == pb.SamplingOptions()
    assert not request.stop.HasField("max_tokens")
    assert request.speculation == pb.SpeculationOptions()
    assert completion().requests[0].stop.max_tokens == 16


def test_a_stop_may_be_one_text_and_what_stops_may_be_told() -> None:
    told = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    (request,) = chat(stop="end", **told).requests
    assert (list(request.stop.strings), request.stop.include_stop) == (["end"], True)
    assert request.output.special_tokens


@pytest.mark.parametrize(
    ("given", "part", "expected"),
    [
        ({"top_k": -1}, "sampling", {"top_k": 0}),
        ({"top_k": 0}, "sampling", {"top_k": 0}),
        ({"seed": -1}, "sampling", {"seed": 2**64 - 1}),  # two's complement
        ({"speculation": {"mode": "auto"}}, "speculation", {}),
        ({"speculative": False}, "speculation", {"mode": pb.SPECULATION_MODE_OFF}),
        ({"speculative": True}, "speculation", {}),
        # What agrees is no contradiction.
        (
            {"speculative": False, "speculation": {"mode": "off"}},
            "speculation",
            {"mode": pb.SPECULATION_MODE_OFF},
        ),
        (
            {"speculative": True, "speculation": {"mode": "ssd", "depth": 1}},
            "speculation",
            {"mode": pb.SPECULATION_MODE_SSD, "depth": 1},
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, "speculation", {}),
    ],
)
def test_other_ways_to_say_it(given: dict[str, Any], part: str, expected: dict[str, Any]) -> None:
    (request,) = completion(**{"seed": 1, **given}).requests
    told = {"seed": 1, **expected} if part == "sampling" else expected
    assert getattr(request, part) == type(getattr(request, part))(**told)


def test_seeds_of_choices_differ_and_the_first_is_the_request_s() -> None:
    seeds = [seed_of_choice(5, index) for index in range(64)]
    assert (seeds[0], len(set(seeds))) == (5, 64)
    requests = completion(seed=5, n=3, best_of=3).requests
    assert [each.sampling.seed for each in requests] == seeds[:3]


def test_prompts_times_choices() -> None:
    requests = completion(prompt=[[1, 2], [3]], n=2, seed=5).requests
    assert [unpack(each.token_ids) for each in requests] == [[1, 2], [1, 2], [3], [3]]
    assert refused(completion, prompt=["a"] * 100, n=3) == "n"
    assert refused(completion, prompt=[]) == refused(completion, prompt=[1, "a"]) == "prompt"


def test_an_echo_of_no_tokens_asks_for_one() -> None:
    translated = completion(echo=True, max_tokens=0, logprobs=1)
    assert translated.wanted.no_output
    (request,) = translated.requests
    assert (request.stop.max_tokens, request.logprobs.prompt) == (1, True)
    assert refused(completion, max_tokens=0) == "max_tokens"


SHEEP = "You tell stories of sheep. " * 100
SYSTEM = {"role": "system", "content": SHEEP}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("ask", "one", "other", "alike"),
    [
        # Turns of one conversation, and not of another one.
        (chat, {}, {"messages": [*MESSAGES, user("So?")]}, True),
        (chat, {}, {"messages": [MESSAGES[0], user("Bye")]}, False),
        # A beginning that is worth a cache is told by itself, whatever is asked after it.
        (chat, {"messages": [SYSTEM, user("1")]}, {"messages": [SYSTEM, user("2")]}, True),
        (completion, {"prompt": f"{SHEEP} 1"}, {"prompt": f"{SHEEP} 2"}, True),
        (completion, {"prompt": SHEEP[:300]}, {"prompt": f"{SHEEP[:300]} So?"}, True),
        (completion, {"prompt": [*range(100)]}, {"prompt": [*range(100), 7]}, True),
        (completion, {"prompt": "Story 1"}, {"prompt": "Story 2"}, False),
    ],
)
def test_what_begins_alike_has_the_same_affinity(
    ask: Any, one: dict[str, Any], other: dict[str, Any], alike: bool
) -> None:
    assert (ask(**one).affinity == ask(**other).affinity) == alike
    assert chat(prompt_cache_key="mine").affinity == b"mine"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_nothing_honours_is_refused_unless_it_is_neutral(name: str) -> None:
    assert refused(chat, **{name: "something"}) == name
    for neutral in REFUSED[name]:
        chat(**{name: neutral})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.inc"),
        ({"speculative": False, "speculation": {"mode": "ssd"}}, "speculative"),
        ({"speculative": False, "speculation": {"mode": "auto"}}, "speculative"),
        ({"speculative": True, "speculation": {"mode": "off"}}, "speculative"),
        ({"speculation": {"depth": 0}}, "speculation.depth"),
        ({"n": 3, "best_of": 1}, "best_of"),
        ({"n": 3, "best_of": 5}, "best_of"),
        ({"top_k": 1e30}, "top_k"),
        ({"top_k": 10**4000}, "top_k"),
        ({"seed": 1e30}, "seed"),
        ({"seed": 10**4000}, "seed"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"speculation": {"mode": "x" * 5000}}, "speculation.mode"),
    ],
)
def test_what_cannot_be_sent_or_would_change_nothing_is_refused(
    given: dict[str, Any], param: str
) -> None:
    assert str(refused(completion, **given)).startswith(param)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ChatRequest, "echo", True),
        (ChatRequest, "best_of", 2),
        (ChatRequest, "prompt", "Once"),
        (CompletionRequest, "max_completion_tokens", 5),
        (CompletionRequest, "tools", [{"type": "function"}]),
        (CompletionRequest, "reasoning_effort", "low"),
        *((ChatRequest, name, "something") for name in sorted(REFUSED)),
    ],
)
def test_what_is_known_is_not_dropped_as_unknown(kind: Any, name: str, value: Any) -> None:
    """Also where the operator allows unknown fields."""

    def read(given: Any) -> None:
        read_fields(json.dumps({**needed, name: given}).encode(), kind, allow_unknown=True)

    needed = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "Once"}
    assert refused(lambda: read(value)) == name
    read(None)


@pytest.mark.parametrize("ask", [chat, completion])
def test_a_value_that_is_null_asks_for_nothing(ask: Any) -> None:
    kind = ChatRequest if ask is chat else CompletionRequest
    names = {*kind.__struct_encode_fields__, *REFUSED, "beam_width"} - {"messages", "prompt"}
    plain = ask(seed=3)
    for name in names - {"seed"}:
        assert ask(seed=3, **{name: None}) == plain, name
    for content in (
        {"stream": True, "stream_options": dict.fromkeys(StreamOptions.__struct_fields__)},
        {"response_format": {"type": "text", "json_schema": None, "x": None}},
        {"logit_bias": {"5": None}},
        {"metadata": {"a": None}},
    ):
        assert ask(seed=3, **content) == plain, content
    none = {**dict.fromkeys(SpeculationFields.__struct_fields__), "x": None}
    assert ask(seed=3, speculation=none) == ask(seed=3, speculation={})
    schema = {"const": None}
    form = {"name": None, "description": None, "schema": schema, "strict": None}
    (request,) = ask(response_format={"type": "json_schema", "json_schema": form}).requests
    assert json.loads(request.grammar.json_schema) == schema
    assert refused(ask, messages=None, prompt=None) == ("messages" if ask is chat else "prompt")


def test_two_limits_of_tokens_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].stop.max_tokens == 5
    assert refused(chat, max_tokens=5, max_completion_tokens=6) == "max_tokens"
    assert refused(chat, max_tokens=5, max_completion_tokens=0) == "max_completion_tokens"


def test_numbers_that_a_template_cannot_be_told_are_refused() -> None:
    assert refused(chat, chat_template_kwargs={"a": 10**400}) == "chat_template_kwargs"


def test_efforts_are_those_of_the_contract() -> None:
    for effort in EFFORTS:
        (request,) = chat(reasoning_effort=effort).requests
        assert request.chat.template_kwargs["reasoning_effort"] == effort
    for wrong in ("x" * 5000, "Low"):
        assert refused(chat, reasoning_effort=wrong) == "reasoning_effort"


def test_unknown_fields_are_refused_unless_the_operator_allows_them() -> None:
    assert refused(chat, beam_width=4) == "beam_width"
    body = json.dumps({"messages": MESSAGES, "beam_width": 4}).encode()
    read_fields(body, ChatRequest, allow_unknown=True)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": [', b"\xff\xfe", b'{"a":' * 5000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refused(lambda: read_fields(body, ChatRequest, False)) is None
