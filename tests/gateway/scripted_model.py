"""A target whose model says what a script tells it, one token for each byte."""

import codecs
import struct
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc


@dataclass
class ScriptedModel(rpc.TargetServiceServicer):
    """``says``: what it answers. ``dies_after``: tokens after which it is lost, unless a request
    goes on with what is there."""

    chat_format: pb.ChatFormat
    says: Callable[[pb.GenerateRequest], str]
    dies_after: int | None = None
    max_request_bytes: int = 0
    prompt: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    address: str = ""

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            name="scripted",
            max_num_seqs=64,
            max_model_len=1 << 20,
            chat_format=self.chat_format,
            max_request_bytes=self.max_request_bytes,
        )

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        seed = request.sampling.seed
        started = pb.GenerateStarted(seed=seed, prompt_tokens=4, model_fingerprint="scripted")
        yield pb.GenerateResponse(started=started)
        if request.return_prompt:
            yield pb.GenerateResponse(prompt=pb.GeneratePrompt(text=self.prompt))
        data, decoder = self.says(request).encode(), codecs.getincrementaldecoder("utf-8")()
        there = bytes(token for (token,) in struct.iter_unpack("<I", request.generated_token_ids))
        assert data.startswith(there)
        for count, byte in enumerate(data):
            text = decoder.decode(bytes([byte]))
            if count < len(there):
                continue
            if count == self.dies_after and not there:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield pb.GenerateResponse(tokens=_token(request, byte, text))
        usage = pb.Usage(prompt_tokens=4, completion_tokens=len(data))
        finish = pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, usage=usage, seed=seed)
        yield pb.GenerateResponse(finish=finish)


def _token(request: pb.GenerateRequest, byte: int, text: str) -> pb.GenerateTokens:
    tokens = pb.GenerateTokens(
        token_ids=[byte],
        text=text,
        text_lengths=[len(text.encode())],
        origins=[pb.TOKEN_ORIGIN_TARGET],
    )
    if request.logprobs.chosen:
        tokens.logprobs.add(chosen=-0.5, token=bytes([byte]))
    return tokens


@contextmanager
def serving(model: ScriptedModel) -> Iterator[ScriptedModel]:
    server = grpc.server(futures.ThreadPoolExecutor(16))
    checks = health.HealthServicer()
    checks.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    rpc.add_TargetServiceServicer_to_server(model, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    model.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield model
    finally:
        server.stop(0).wait()
