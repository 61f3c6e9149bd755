"""What a process offers, as it says itself; and requests that it would serve."""

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ssd.v1 import speculation_pb2 as speculation
from ssd.v1 import target_pb2 as target
from ssd.v1 import trace_pb2 as trace
from ssd_engine.text.token_ids import pack_tokens
from tests.processes import ServiceProcess

EPOCH = 1


@dataclass(frozen=True)
class Rpc:
    path: str
    request: Any  # descriptor of its message
    streams_requests: bool


def offered(process: ServiceProcess) -> list[Rpc]:
    """Every method of every service, by reflection."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with process.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(iter(stub.ServerReflectionInfo(iter([ask]), timeout=30)))
    names = [service.name for service in answer.list_services_response.service]
    pool = descriptor_pool.Default()
    return [
        Rpc(f"/{name}/{method.name}", method.input_type, method.client_streaming)
        for name in names
        for method in pool.FindServiceByName(name).methods
    ]


def hello(info: speculation.GetDraftInfoResponse, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "protocol_version": info.protocol_version,
        "oldest_protocol_version": info.protocol_version,
        "epoch": EPOCH,
        "target_name": "fuzz",
        "tokenizer_fingerprint": info.tokenizer_fingerprint,
        "vocab_size": info.vocab_size,
        "max_depth": 8,
    }
    message = speculation.SpeculateRequest(hello=speculation.Hello(**{**fields, **changes}))
    return message.SerializeToString()


def frames(*frames: speculation.TargetFrame) -> bytes:
    body = speculation.TargetFrames(epoch=EPOCH, frames=frames)
    return speculation.SpeculateRequest(frames=body).SerializeToString()


def rounds() -> list[bytes]:
    """What a target says of a sequence, message by message."""
    opening = speculation.Open(
        prompt=pack_tokens([1, 2, 3]),
        max_tokens=20,
        sampling=target.SamplingOptions(seed=1),
        verification=target.VERIFICATION_MODE_COUPLED,
        depth=4,
    )
    launch = speculation.Launch(
        speculation=[7, 8], source=speculation.SPECULATION_SOURCE_CACHE, depth=4
    )
    frame = speculation.TargetFrame
    return [
        frames(frame(sequence=1, open=opening)),
        frames(
            frame(sequence=1, outcome=speculation.Outcome(token=5)),
            frame(sequence=1, round=1, launch=launch),
        ),
        frames(frame(sequence=1, round=1, outcome=speculation.Outcome(accepted=1, token=9))),
        frames(frame(sequence=1, close=speculation.Close())),
    ]


def generations() -> list[target.GenerateRequest]:
    stop = target.StopOptions(max_tokens=3)
    chat = target.ChatPrompt(messages=[target.ChatMessage(role="user", content="hi")])
    off = target.SpeculationOptions(mode=target.SPECULATION_MODE_OFF)
    drawn = target.SamplingOptions(temperature=0.7, top_k=50, seed=3, logit_bias={5: 1.0})
    return [
        target.GenerateRequest(text="Once upon", stop=stop),
        target.GenerateRequest(chat=chat, stop=stop, sampling=drawn),
        target.GenerateRequest(
            token_ids=pack_tokens([5, 6]),
            generated_token_ids=pack_tokens([7]),
            stop=stop,
            speculation=off,
            logprobs=target.LogprobOptions(top_n=3, token_bytes=True),
            return_prompt=True,
        ),
        target.GenerateRequest(
            chat=json_chat(),
            stop=target.StopOptions(max_tokens=3, strings=["a"], include_stop=True),
            output=target.TextOptions(special_tokens=True),
        ),
    ]


def json_chat() -> target.ChatPrompt:
    messages = b'[{"role":"user","content":[{"type":"text","text":"hi"}]},{"role":"assistant"%s}]'
    return target.ChatPrompt(
        messages_json=messages % b',"content":"so"', continue_final_message=True
    )


def valid_requests(info: speculation.GetDraftInfoResponse) -> dict[str, list[bytes]]:
    """By the name of the message."""
    ask = reflection_pb2.ServerReflectionRequest
    messages = [
        *generations(),
        target.TokenizeRequest(text="Once upon", add_special_tokens=False),
        target.TokenizeRequest(chat=json_chat()),
        target.DetokenizeRequest(token_ids=pack_tokens([5, 6])),
        trace.GetTraceRequest(first_event=1, max_events=10),
        *(health_pb2.HealthCheckRequest(service=name) for name in ("", "readiness", "liveness")),
        ask(file_containing_symbol="ssd.v1.TargetService"),
        ask(file_by_filename="ssd/v1/target.proto"),
        ask(all_extension_numbers_of_type="ssd.v1.Hello"),
        ask(file_containing_extension={"containing_type": "ssd.v1.Hello", "extension_number": 7}),
    ]
    valid: dict[str, list[bytes]] = {"ssd.v1.SpeculateRequest": [hello(info), *rounds()]}
    for message in messages:
        valid.setdefault(message.DESCRIPTOR.full_name, []).append(message.SerializeToString())
    return valid
