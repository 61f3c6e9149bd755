"""Bad input gets a status that names the field and the bound; nothing hangs, nothing leaks."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.front.requests import largest_request
from tests.processes import TargetProcess, collect, wait_until_idle

NAN, INF = float("nan"), float("inf")
METHOD = "/ssd.v1.TargetService/Generate"


@pytest.fixture(scope="module")
def server(lone_target: TargetProcess) -> TargetProcess:
    """Books are checked after every step: a leak ends the process, and with it these tests."""
    return lone_target


def valid() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Once upon", stop=pb.StopOptions(max_tokens=4))


def sampling(**values: object) -> Callable[[pb.GenerateRequest], None]:
    return lambda m: m.sampling.MergeFrom(pb.SamplingOptions(**values))  # type: ignore[arg-type]


def assign(path: str, value: object) -> Callable[[pb.GenerateRequest], None]:
    """Set a scalar, or fill a repeated field, at a dotted path."""

    def change(message: pb.GenerateRequest) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, list):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)

    return change


def ids(*tokens: int) -> bytes:
    return pack_tokens(tokens)


def bias(entries: dict[int, float]) -> Callable[[pb.GenerateRequest], None]:
    return lambda m: m.sampling.logit_bias.update(entries)


def chat(*messages: tuple[str, str]) -> Callable[[pb.GenerateRequest], None]:
    def change(message: pb.GenerateRequest) -> None:
        message.chat.messages.extend(pb.ChatMessage(role=r, content=c) for r, c in messages)
        message.chat.SetInParent()

    return change


CASES: dict[str, tuple[Callable[[pb.GenerateRequest], None], str, str]] = {
    "empty text": (assign("text", ""), "text", "at least one token"),
    "no prompt": (lambda m: m.ClearField("text"), "prompt", "text, chat or token_ids"),
    "empty chat": (chat(), "chat.messages", "at least one message"),
    "chat without a role": (chat(("", "hi")), "chat.messages[0].role", "user"),
    "unknown role": (chat(("wizard", "hi")), "chat.messages", "template"),
    "empty token ids": (assign("token_ids", b""), "token_ids", "at least one token"),
    "ragged token ids": (assign("token_ids", b"\x01\x00\x00"), "token_ids", "multiple of 4"),
    "wrong token id": (assign("token_ids", ids(5, 4096)), "token_ids[1]", "4096"),
    "huge token id": (assign("token_ids", ids(2**32 - 1)), "token_ids[0]", "vocabulary"),
    "prompt over the context": (assign("token_ids", ids(*[7] * 2048)), "token_ids", "2048"),
    "prompt far over the context": (assign("token_ids", ids(*[7] * 9999)), "token_ids", "2048"),
    "text over the context": (assign("text", "story " * 3000), "text", "2048"),
    "text far over the context": (assign("text", "x" * 1_000_000), "text", "2048"),
    "wrong generated id": (assign("generated_token_ids", ids(9999)), "generated_token_ids[0]", ""),
    "ragged generated ids": (assign("generated_token_ids", b"x"), "generated_token_ids", "4"),
    "generated beyond its end": (
        assign("generated_token_ids", ids(9, 9, 9, 9, 9)),
        "generated_token_ids",
        "had ended",
    ),
    "max_tokens 0": (assign("stop.max_tokens", 0), "stop.max_tokens", "[1, "),
    "max_tokens over the context": (assign("stop.max_tokens", 2048), "stop.max_tokens", "2048"),
    "min_tokens over max_tokens": (assign("stop.min_tokens", 9), "stop.min_tokens", "[0, "),
    "thousands of stop strings": (assign("stop.strings", ["x"] * 5000), "stop.strings", "128"),
    "empty stop string": (assign("stop.strings", ["ok", ""]), "stop.strings[1]", "1 to 1024"),
    "stop strings of many bytes": (
        assign("stop.strings", ["z" * 1000] * 9),
        "stop.strings",
        "8192",
    ),
    "role of thousands": (chat(("w" * 12000, "hi")), "chat.messages[0].role", "64"),
    "long stop string": (assign("stop.strings", ["y" * 2000]), "stop.strings[0]", "1024"),
    "thousands of stop ids": (assign("stop.token_ids", [1] * 5000), "stop.token_ids", "1024"),
    "wrong stop id": (assign("stop.token_ids", [4096]), "stop.token_ids", "4096"),
    "too many logprobs": (assign("logprobs.top_n", 21), "logprobs.top_n", "20"),
    "long request id": (assign("request_id", "r" * 300), "request_id", "256"),
    "temperature NaN": (sampling(temperature=NAN), "sampling.temperature", "[0.001, 100]"),
    "temperature negative": (sampling(temperature=-1.0), "sampling.temperature", "got -1"),
    "temperature infinite": (sampling(temperature=INF), "sampling.temperature", "got inf"),
    "temperature tiny": (sampling(temperature=1e-9), "sampling.temperature", "0 or in"),
    "top_k over the vocabulary": (sampling(top_k=4097), "sampling.top_k", "4096"),
    "top_p 0": (sampling(top_p=0.0), "sampling.top_p", "(0, 1]"),
    "top_p NaN": (sampling(top_p=NAN), "sampling.top_p", "(0, 1]"),
    "min_p above 1": (sampling(min_p=1.5), "sampling.min_p", "[0, 1]"),
    "repetition_penalty 0": (
        sampling(repetition_penalty=0.0),
        "sampling.repetition_penalty",
        "[0.01, 100]",
    ),
    "presence_penalty NaN": (sampling(presence_penalty=NAN), "sampling.presence_penalty", "100"),
    "frequency_penalty infinite": (
        sampling(frequency_penalty=INF),
        "sampling.frequency_penalty",
        "100",
    ),
    "bias for a wrong token": (bias({5000: 1.0}), "sampling.logit_bias", "5000"),
    "bias NaN": (bias({5: NAN}), "sampling.logit_bias", "[-100, 100]"),
    "bias of thousands": (bias(dict.fromkeys(range(2000), 1.0)), "sampling.logit_bias", "1024"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_field_is_refused_by_name(server: TargetProcess, name: str) -> None:
    change, field, bound = CASES[name]
    message = valid()
    change(message)
    status = refusal(server, message.SerializeToString())
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    violations = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(violations)
    assert violations.field_violations[0].field == field
    assert bound in violations.field_violations[0].description
    assert status.message.startswith(f"{field}: ")
    # A step of the engine checks its books: whatever the refusal left there would end the server.
    assert collect(server.stub().Generate(valid(), timeout=60)).tokens


def refusal(server: TargetProcess, data: bytes) -> Any:
    with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(METHOD)(data, timeout=60))
    return rpc_status.from_call(caught.value)


def test_a_string_that_is_not_utf8_is_refused(server: TargetProcess) -> None:
    status = refusal(server, b"\x12\x04caf\xe9")  # the field ``text``
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "a string in it is not UTF-8" in status.message


def test_a_message_of_100_mb_is_refused_with_the_bound(server: TargetProcess) -> None:
    """Which follows from what the longest request needs, where that is less than is allowed."""
    with server.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(METHOD)(b"\x00" * 100_000_000, timeout=60))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert f"vs. {largest_request(2048)}" in caught.value.details()  # type: ignore[attr-defined]


def test_after_all_that_the_server_serves_and_holds_nothing(server: TargetProcess) -> None:
    assert len(collect(server.stub().Generate(valid(), timeout=60)).tokens) == 4
    wait_until_idle(server)
    assert server.process.poll() is None
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    "extreme",
    [
        assign("stop.strings", [f"{i}".rjust(64, "x") for i in range(10, 138)]),
        assign("token_ids", ids(*[7] * 2044)),
        assign("logprobs.top_n", 20),
    ],
    ids=["most stop strings", "longest prompt", "most logprobs"],
)
def test_requests_at_the_bound_are_served(
    server: TargetProcess, extreme: Callable[[pb.GenerateRequest], None]
) -> None:
    message = valid()
    extreme(message)
    assert collect(server.stub().Generate(message, timeout=120)).finish.usage.completion_tokens >= 1
