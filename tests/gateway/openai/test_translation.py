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


def test_every_sampling_field_reaches_the_target() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    (request,) = completion(**fields, logit_bias={"5": -2.5}, seed=3).requests
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value
    assert dict(request.sampling.logit_bias) == {5: -2.5}
    assert request.sampling.seed == 3


def test_what_is_not_said_is_left_to_the_target() -> None:
    (request,) = chat().requests
    request.sampling.ClearField("seed")
    assert request.sampling == pb.SamplingOptions()
    assert not request.stop.HasField("max_tokens")
    assert request.speculation == pb.SpeculationOptions()


def test_stops_reach_the_target() -> None:
    (request,) = chat(
        stop="end",
        stop_token_ids=[4],
        ignore_eos=True,
        min_tokens=3,
        include_stop_str_in_output=True,
        max_tokens=8,
        max_completion_tokens=8,
        skip_special_tokens=False,
    ).requests
    stop = request.stop
    assert (list(stop.strings), list(stop.token_ids)) == (["end"], [4])
    assert (stop.ignore_eos, stop.min_tokens, stop.include_stop) == (True, 3, True)
    assert stop.max_tokens == 8
    assert request.output.special_tokens


@pytest.mark.parametrize("k", [-1, 0])
def test_top_k_below_one_keeps_all(k: int) -> None:
    (request,) = completion(top_k=k).requests
    assert request.sampling.top_k == 0


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({"speculation": {"mode": "ssd", "depth": 3}}, pb.SPECULATION_MODE_SSD),
        ({"speculation": {"mode": "auto"}}, pb.SPECULATION_MODE_UNSPECIFIED),
        ({"speculative": False}, pb.SPECULATION_MODE_OFF),
        ({"speculative": True}, pb.SPECULATION_MODE_UNSPECIFIED),
    ],
)
def test_modes_by_both_spellings(given: dict[str, Any], mode: int) -> None:
    (request,) = completion(**given).requests
    assert request.speculation.mode == mode


def test_negative_seeds_are_two_s_complements() -> None:
    assert completion(seed=-1).requests[0].sampling.seed == 2**64 - 1
    assert completion(seed=2**64 - 1).requests[0].sampling.seed == 2**64 - 1


def test_seeds_of_choices_differ_and_the_first_is_the_request_s() -> None:
    seeds = [seed_of_choice(5, index) for index in range(64)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 64
    assert [each.sampling.seed for each in completion(seed=5, n=3).requests] == seeds[:3]


def test_prompts_times_choices() -> None:
    requests = completion(prompt=[[1, 2], [3]], n=2, seed=5).requests
    assert [unpack(each.token_ids) for each in requests] == [[1, 2], [1, 2], [3], [3]]
    assert refused(completion, prompt=["a"] * 100, n=3) == "n"
    assert refused(completion, prompt=[]) == "prompt"
    assert refused(completion, prompt=[1, "a"]) == "prompt"


def test_an_echo_of_no_tokens_asks_for_one() -> None:
    translated = completion(echo=True, max_tokens=0, logprobs=1)
    assert translated.wanted.no_output
    (request,) = translated.requests
    assert request.stop.max_tokens == 1
    assert request.logprobs.prompt
    assert refused(completion, max_tokens=0) == "max_tokens"


def test_turns_of_one_conversation_have_the_same_affinity() -> None:
    later = [*MESSAGES, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "So?"}]
    assert chat().affinity == chat(messages=later).affinity
    other = [MESSAGES[0], {"role": "user", "content": "Bye"}]
    assert chat().affinity != chat(messages=other).affinity
    assert chat(prompt_cache_key="mine").affinity == b"mine"


def test_questions_after_one_long_beginning_have_the_same_affinity() -> None:
    """A beginning that is worth a cache is told by itself, whatever is asked after it."""
    system = {"role": "system", "content": "You tell stories of sheep. " * 100}
    chats = [chat(messages=[system, {"role": "user", "content": str(i)}]) for i in range(20)]
    assert len({each.affinity for each in chats}) == 1
    texts = [completion(prompt=system["content"] + str(i)) for i in range(20)]
    assert len({each.affinity for each in texts}) == 1
    text = "Once upon a time there was a sheep. " * 8
    assert completion(prompt=text).affinity == completion(prompt=text + "It slept.").affinity
    ids = list(range(100))
    assert completion(prompt=ids).affinity == completion(prompt=[*ids, 7]).affinity
    assert len({completion(prompt=f"Story {i}").affinity for i in range(20)}) == 20


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_nothing_honours_is_refused_by_name(name: str) -> None:
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


def test_what_agrees_is_no_contradiction() -> None:
    (request,) = completion(speculative=False, speculation={"mode": "off"}).requests
    assert request.speculation.mode == pb.SPECULATION_MODE_OFF
    (request,) = completion(speculative=True, speculation={"mode": "ssd", "depth": 1}).requests
    assert (request.speculation.mode, request.speculation.depth) == (pb.SPECULATION_MODE_SSD, 1)
    assert len(completion(n=3, best_of=3).requests) == 3
    completion(stream=True, stream_options={"include_obfuscation": False})


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
    nested = [
        {"stream": True, "stream_options": dict.fromkeys(StreamOptions.__struct_fields__)},
        {"response_format": {"type": "text", "json_schema": None, "x": None}},
        {"logit_bias": {"5": None}},
        {"metadata": {"a": None}},
    ]
    for content in nested:
        assert ask(seed=3, **content) == plain, content
    none = {**dict.fromkeys(SpeculationFields.__struct_fields__), "x": None}
    assert ask(seed=3, speculation=none) == ask(seed=3, speculation={})
    schema = {"const": None}
    form = {"name": None, "description": None, "schema": schema, "strict": None}
    (request,) = ask(response_format={"type": "json_schema", "json_schema": form}).requests
    assert json.loads(request.grammar.json_schema) == schema
    assert refused(ask, messages=None, prompt=None) == ("messages" if ask is chat else "prompt")


def test_two_limits_of_tokens_agree() -> None:
    (request,) = chat(max_tokens=5, max_completion_tokens=5).requests
    assert request.stop.max_tokens == 5
    assert refused(chat, max_tokens=5, max_completion_tokens=6) == "max_tokens"
    assert refused(chat, max_tokens=5, max_completion_tokens=0) == "max_completion_tokens"


def test_numbers_that_a_template_cannot_be_told_are_refused() -> None:
    assert refused(chat, chat_template_kwargs={"a": 10**400}) == "chat_template_kwargs"


def test_efforts_are_those_of_the_contract() -> None:
    for effort in EFFORTS:
        (request,) = chat(reasoning_effort=effort).requests
        assert request.chat.template_kwargs["reasoning_effort"] == effort
    assert refused(chat, reasoning_effort="x" * 5000) == "reasoning_effort"
    assert refused(chat, reasoning_effort="Low") == "reasoning_effort"


def test_unknown_fields_are_refused_unless_the_operator_allows_them() -> None:
    assert refused(chat, beam_width=4) == "beam_width"
    body = json.dumps({"messages": MESSAGES, "beam_width": 4}).encode()
    read_fields(body, ChatRequest, allow_unknown=True)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": [', b"\xff\xfe", b'{"a":' * 5000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields(body, ChatRequest, False)
    assert caught.value.status == 400
