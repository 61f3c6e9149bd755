"""A request with a string that is not UTF-8 is refused, and so is what is no message."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import TOO_LONG, InputError
from ssd_target.front.requests import (
    RequestLimits,
    parse_logprobs,
    parse_message,
    parse_prompt,
    parse_rules,
)
from tests.suite.scale import share

MARK = "MARK"
CONTEXT = "This model's maximum context length is"
NOT_UTF8 = {
    "stray byte": b"M\xffRK",
    "continuation first": b"\x80ARK",
    "cut character": b"MA\xe2\x82",
    "overlong": b"\xc0\xafRK",
    "surrogate": b"M\xed\xa0\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
}


def full_request() -> pb.GenerateRequest:
    """Every kind of field: strings, bytes, numbers, maps, repeated and nested ones."""
    return pb.GenerateRequest(
        request_id="é",
        text="€",
        generated_token_ids=b"\xff\xff\xff\xff",
        sampling=pb.SamplingOptions(
            temperature=0.5, top_k=300, top_p=0.5, logit_bias={1: 2.5, 70_000: -1.0}, seed=2**64 - 1
        ),
        stop=pb.StopOptions(
            max_tokens=2**32 - 1, strings=["😀", ""], token_ids=[1, 2**31], include_stop=True
        ),
        logprobs=pb.LogprobOptions(chosen=True, top_n=3, token_bytes=True),
        return_prompt=True,
        output=pb.TextOptions(special_tokens=True),
    )


def marked(field: str) -> pb.GenerateRequest:
    """The full request with MARK in one string."""
    message = full_request()
    if field in ("request_id", "text"):
        setattr(message, field, MARK)
    elif field == "stop.strings":
        message.stop.strings.append(MARK)
    else:
        said = {"role": "user", "content": "hello", field.rpartition(".")[2]: MARK}
        message.chat.messages.add(role="system", content="be brief")
        message.chat.messages.add(**said)
        message.chat.messages_json = b"\xff"
        message.chat.add_generation_prompt = message.chat.continue_final_message = True
    return message


FIELDS = ["request_id", "text", "chat.messages.role", "chat.messages.content", "stop.strings"]


@pytest.mark.parametrize("bad", NOT_UTF8.values(), ids=NOT_UTF8)
@pytest.mark.parametrize("field", FIELDS)
def test_a_string_that_is_not_utf8_is_refused(field: str, bad: bytes) -> None:
    data = marked(field).SerializeToString()
    assert data.count(MARK.encode()) == 1
    assert parse_message(data) == marked(field)
    with pytest.raises(InputError, match="a string in it is not UTF-8"):
        parse_message(data.replace(MARK.encode(), bad))


def test_fields_that_a_later_version_added_are_passed_over() -> None:
    unknown = (
        b"\xf8\x07\x96\x01"  # field 127, varint
        b"\xf9\x07" + b"\xff" * 8 + b"\xfd\x07" + b"\xff" * 4 + b"\xfa\x07\x02\xff\xff"
    )
    assert parse_message(unknown + b"\x12\x01x").text == "x"
    with pytest.raises(InputError, match="a string in it is not UTF-8"):
        parse_message(unknown + b"\x12\x01\xff")


CUT = pb.GenerateRequest(text="a€").SerializeToString()[:-1]  # no string is to blame


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0b", b"\x12\x7f", b"\x12", b"\x0f", b"\x09\x00", CUT]
)
def test_what_is_no_message_at_all_is_refused_as_such(data: bytes) -> None:
    with pytest.raises(InputError, match="is not a GenerateRequest message") as error:
        parse_message(data)
    assert error.value.field == "request"


@given(st.data())
@settings(max_examples=share(8000), derandomize=True, deadline=None)
def test_a_damaged_request_is_parsed_or_refused(data: st.DataObject) -> None:
    message = bytearray(marked(data.draw(st.sampled_from(FIELDS))).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        expected = pb.GenerateRequest.FromString(bytes(message))
    except DecodeError:
        with pytest.raises(InputError):  # and no other
            parse_message(bytes(message))
    else:
        parsed = parse_message(bytes(message))  # floats may be NaN, which equals nothing
        written = [each.SerializeToString(deterministic=True) for each in (parsed, expected)]
        assert written[0] == written[1]


@pytest.mark.parametrize("asked", [{"chosen": True}, {"top_n": 2}, {"prompt": True}])
def test_made_up_acceptance_has_no_log_probabilities(asked: dict[str, int]) -> None:
    with pytest.raises(InputError, match="makes acceptance up"):
        parse_logprobs(pb.LogprobOptions(**asked), synthetic=True)  # type: ignore[arg-type]


@pytest.mark.timeout(150)
def test_a_message_of_one_endless_number_is_refused_without_delay() -> None:
    """Taken as one number, the 16 MiB that are allowed would take hours."""
    with pytest.raises(InputError, match="is not a GenerateRequest message"):
        parse_message(b"\xff" * 2**21)


@pytest.mark.parametrize(("tokens", "kv_tokens"), [(8, 99), (9, 99), (4, 4)])
def test_a_prompt_that_leaves_no_room_says_so_to_programs(tokens: int, kv_tokens: int) -> None:
    limits = RequestLimits(100, max_model_len=8, kv_tokens=kv_tokens, eos_token_ids=())
    message = pb.GenerateRequest(token_ids=b"\1\0\0\0" * tokens)
    tokenizer: Any = None  # token ids need none
    with pytest.raises(
        InputError, match=rf"^token_ids: {CONTEXT} [48] t.* requested {tokens} tokens"
    ) as error:
        parse_prompt(message, tokenizer, limits)
    assert error.value.reason == TOO_LONG


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, TOO_LONG), (0, "")])
def test_more_output_than_there_is_room_for_says_so(max_tokens: int, reason: str) -> None:
    limits = RequestLimits(100, max_model_len=8, kv_tokens=99, eos_token_ids=())
    with pytest.raises(InputError) as error:
        parse_rules(pb.StopOptions(max_tokens=max_tokens), 5, limits)
    assert (error.value.field, error.value.reason) == ("stop.max_tokens", reason)
    words = "8 tokens. However, you requested 9 tokens (5 in the prompt, 4 by stop.max_tokens, "
    assert error.value.problem.startswith(f"{CONTEXT} {words}") == bool(reason)
