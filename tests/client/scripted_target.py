"""A target without a model: a fixed sequence of tokens, and a script of what goes wrong.

Token i is a function of seed and position, so a resumed stream is right only if the client sent
the seed and every token back. Text lags one token behind, as a real server's may: a resume that is
right in tokens but not in text shows.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ssd.v1 import target_pb2, target_pb2_grpc

DRAWN_SEED = 2**64 - 5
FINGERPRINT = "model-a"
ANY = "127.0.0.1:0"


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 50_000


def piece(token_id: int) -> str:
    return f"{token_id}é "


def full_text(count: int, seed: int = DRAWN_SEED) -> str:
    return "".join(piece(token(seed, i)) for i in range(count))


def full_tokens(count: int, seed: int = DRAWN_SEED) -> list[int]:
    return [token(seed, i) for i in range(count)]


def unpack(data: bytes) -> list[int]:
    return [each for (each,) in struct.iter_unpack("<I", data)]


@dataclass
class Script:
    """What one server does; a count says after how many tokens of a call it happens."""

    tokens: int = 12
    fingerprint: str = FINGERPRINT
    refuse: Callable[[grpc.ServicerContext], None] | None = None  # aborts before `started`
    abort_after: tuple[int, grpc.StatusCode, str] | None = None
    end_after: int | None = None  # the stream ends without a finish
    hang_after: int | None = None
    exit_after: int | None = None  # the whole process dies
    beat_millis: int = 0  # as its `started` says; it never beats
    pause_s: float = 0.0
    linger_s: float = 0.0  # between the finish and the end of the call
    text: str | None = None  # instead of the pieces of its tokens
    stopped_by: str | int | None = None
    speculation: dict | None = None  # fields of the statistics in its finish
    by_mode: bool = False  # broken: what it draws depends on how it speculates


@dataclass
class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    script: Script
    requests: list[target_pb2.GenerateRequest] = field(default_factory=list)
    seconds_left: list[float | None] = field(default_factory=list)  # of each request's deadline
    hanging: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended_well: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request, context):
        self.requests.append(request)
        self.seconds_left.append(context.time_remaining())
        done = threading.Event()
        context.add_callback(lambda: self._ended(context, done))
        if self.script.refuse:
            self.script.refuse(context)
        seed = request.sampling.seed if request.sampling.HasField("seed") else DRAWN_SEED
        yield _started(request, seed, self.script)
        seed += request.speculation.mode if self.script.by_mode else 0
        ids = unpack(request.generated_token_ids)
        if ids != full_tokens(len(ids), seed):
            context.abort(grpc.StatusCode.INTERNAL, "these are not the tokens of this seed")
        total = request.stop.max_tokens or self.script.tokens
        for position in range(len(ids), total + 1):
            if self._goes_wrong(position - len(ids), context, done):
                return
            if position < total:
                yield _tokens(request, seed, position, self._text(seed, position, total))
            time.sleep(self.script.pause_s)
        yield self._finish(total, seed)
        time.sleep(self.script.linger_s)
        self.ended_well.set()

    def GetModelInfo(self, request, context):
        return target_pb2.GetModelInfoResponse(
            name="scripted",
            fingerprint="f" * 64,
            num_parameters=3_000_000_000,
            eos_token_ids=[1, 2],
            has_chat_template=True,
            speculation_modes=[
                target_pb2.SPECULATION_MODE_SSD,
                target_pb2.SPECULATION_MODE_OFF,
            ],
            max_speculation_depth=8,
            speculation_endpoints=[
                target_pb2.SpeculationEndpoint(
                    address="127.0.0.1:7510", state="up", draft_name="tiny", open_sequences=3
                ),
                target_pb2.SpeculationEndpoint(
                    address="gpu-2:7510", state="refused", reason="another tokenizer"
                ),
            ],
        )

    def _goes_wrong(self, sent: int, context: grpc.ServicerContext, done: threading.Event) -> bool:
        script = self.script
        if script.exit_after == sent:
            time.sleep(0.05)  # what was sent before is to arrive
            os._exit(3)
        if script.abort_after and script.abort_after[0] == sent:
            context.abort(*script.abort_after[1:])
        if script.hang_after == sent:
            self.hanging.set()
            done.wait()  # the client or the server ends the call
        return script.end_after == sent

    def _text(self, seed: int, position: int, total: int) -> str:
        """What a token decides: the piece before its own; the last one decides its own, too."""
        if self.script.text is not None:
            return self.script.text
        decided = range(max(position - 1, 0), position + (position == total - 1))
        return "".join(piece(token(seed, each)) for each in decided)

    def _finish(self, total: int, seed: int) -> target_pb2.GenerateResponse:
        finish = target_pb2.GenerateFinish(
            reason=target_pb2.FINISH_REASON_LENGTH,
            usage=target_pb2.Usage(
                prompt_tokens=4, completion_tokens=total, cached_prompt_tokens=2
            ),
            seed=seed,
        )
        if self.script.speculation is not None:
            finish.speculation.CopyFrom(target_pb2.SpeculationStats(**self.script.speculation))
        if self.script.stopped_by is not None:
            finish.reason = target_pb2.FINISH_REASON_STOP
            kind = "stop_string" if isinstance(self.script.stopped_by, str) else "stop_token_id"
            setattr(finish, kind, self.script.stopped_by)
        return target_pb2.GenerateResponse(finish=finish)

    def _ended(self, context: grpc.ServicerContext, done: threading.Event) -> None:
        done.set()
        if not self.ended_well.is_set():
            self.cancelled.set()


def _started(request, seed: int, script: Script) -> target_pb2.GenerateResponse:
    return target_pb2.GenerateResponse(
        started=target_pb2.GenerateStarted(
            request_id=request.request_id or "made-up",
            seed=seed,
            prompt_tokens=4,
            model_fingerprint=script.fingerprint,
            beat_millis=script.beat_millis,
        )
    )


def _tokens(request, seed: int, position: int, text: str) -> target_pb2.GenerateResponse:
    tokens = target_pb2.GenerateTokens(token_ids=[token(seed, position)], text=text)
    if request.logprobs.chosen:
        logprobs = tokens.logprobs.add(chosen=-0.5)
        for rank in range(request.logprobs.top_n):
            logprobs.top.add(token_id=rank, logprob=float("-inf") if rank else -0.25)
    return target_pb2.GenerateResponse(tokens=tokens)


def full(message: str, delay_s: float | None, times: int = 1_000) -> Callable:
    """Refuses `times` calls with RESOURCE_EXHAUSTED, with a retry delay unless it is None."""
    left = [times]

    def refuse(context: grpc.ServicerContext) -> None:
        if left[0] <= 0:
            return
        left[0] -= 1
        details = []
        if delay_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(delay_s * 1e9))
            details = [error_details_pb2.RetryInfo(retry_delay=delay)]
        _abort(context, code_pb2.RESOURCE_EXHAUSTED, message, details)

    return refuse


def invalid(message: str, field_name: str, description: str) -> Callable:
    """Refuses with INVALID_ARGUMENT and a field violation."""

    def refuse(context: grpc.ServicerContext) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field_name, description=description
        )
        bad = error_details_pb2.BadRequest(field_violations=[violation])
        _abort(context, code_pb2.INVALID_ARGUMENT, message, [bad])

    return refuse


def leaving(message: str, delay_s: float, times: int = 1_000) -> Callable:
    """Refuses `times` calls with UNAVAILABLE and a retry delay."""
    left = [times]

    def refuse(context: grpc.ServicerContext) -> None:
        if left[0] > 0:
            left[0] -= 1
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(delay_s * 1e9))
            details = [error_details_pb2.RetryInfo(retry_delay=delay)]
            _abort(context, code_pb2.UNAVAILABLE, message, details)

    return refuse


def status(code: grpc.StatusCode, message: str) -> Callable:
    return lambda context: context.abort(code, message)


def silence(context: grpc.ServicerContext) -> None:
    """Says nothing until the caller has left."""
    left = threading.Event()
    if context.add_callback(left.set):
        left.wait()


def _abort(context: grpc.ServicerContext, code: int, message: str, details: list) -> None:
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))
    )


@dataclass
class Running:
    address: str
    target: ScriptedTarget
    server: grpc.Server
    health: health.HealthServicer

    @property
    def requests(self) -> list[target_pb2.GenerateRequest]:
        return self.target.requests

    def set_ready(self) -> None:
        self.health.set("readiness", health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def serve(
    script: Script | None = None,
    address: str = ANY,
    checks: health.HealthServicer | None = None,
) -> Iterator[Running]:
    """A running target; a given `address` may be held by the fixture `nobody`."""
    server = grpc.server(
        futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", int(address != ANY))]
    )
    target, checks = ScriptedTarget(script or Script()), checks or health.HealthServicer()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield Running(f"127.0.0.1:{port}", target, server, checks)
    finally:
        server.stop(0).wait()
