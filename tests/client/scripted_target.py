"""A target without a model: a fixed sequence of tokens, and a script of what goes wrong.

Token i is a function of seed and position, so a resumed stream is right only if the client sent
the seed and every token back. Text lags one token behind, as a real server's may: a resume that is
right in tokens but not in text shows. Where a script `says` a text, each byte of it is a token.
"""

import codecs
import contextlib
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc

DRAWN_SEED = 2**64 - 5
FINGERPRINT = "model-a"
ANY = "127.0.0.1:0"


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 50_000


def piece(token_id: int) -> str:
    return f"{token_id}é "


def full_text(count: int, seed: int = DRAWN_SEED) -> str:
    return "".join(map(piece, full_tokens(count, seed)))


def full_tokens(count: int, seed: int = DRAWN_SEED) -> list[int]:
    return [token(seed, i) for i in range(count)]


def unpack(data: bytes) -> list[int]:
    return [each for (each,) in struct.iter_unpack("<I", data)]


@dataclass
class Script:
    """What one server does; a count says after how many tokens of a call it happens."""

    name: str = "scripted"
    tokens: int = 12
    says: Callable[[pb.GenerateRequest], str] | None = None  # and then stops
    prompt: str = ""  # as it tells it where it is asked
    chat_format: pb.ChatFormat = field(default_factory=pb.ChatFormat)
    max_request_bytes: int = 0
    fingerprint: str = FINGERPRINT
    refuse: Callable[[grpc.ServicerContext], None] | None = None  # aborts before `started`
    abort_after: tuple[int, grpc.StatusCode, str] | None = None
    abort_resumed: bool = True  # also what another server had begun
    end_after: int | None = None  # the stream ends without a finish
    hang_after: int | None = None
    wait_after: int | None = None  # until `may_go_on`
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
    server: grpc.Server
    address: str = ""
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    seconds_left: list[float | None] = field(default_factory=list)  # of each request's deadline
    num_ended: int = 0  # calls, in whatever way
    hanging: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended_well: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request, context):
        self.requests.append(request)
        self.seconds_left.append(context.time_remaining())
        done = threading.Event()
        context.add_callback(lambda: self._ended(done))
        if self.script.refuse:
            self.script.refuse(context)
        seed = request.sampling.seed if request.sampling.HasField("seed") else DRAWN_SEED
        yield _started(request, seed, self.script)
        if request.return_prompt:
            yield pb.GenerateResponse(prompt=pb.GeneratePrompt(text=self.script.prompt))
        answer, ids = self._answer(request, seed), unpack(request.generated_token_ids)
        if ids != [each for each, _, _ in answer[: len(ids)]]:
            context.abort(grpc.StatusCode.INTERNAL, "these are not the tokens of this seed")
        for position in range(len(ids), len(answer) + 1):
            if self._goes_wrong(position - len(ids), bool(ids), context, done):
                return
            if position < len(answer):
                yield _tokens(request, *answer[position])
            time.sleep(self.script.pause_s)
        yield self._finish(len(answer), seed)
        time.sleep(self.script.linger_s)
        self.ended_well.set()

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(
            name=self.script.name,
            fingerprint="f" * 64,
            num_parameters=3_000_000_000,
            max_num_seqs=64,
            max_model_len=1 << 20,
            max_request_bytes=self.script.max_request_bytes,
            eos_token_ids=[1, 2],
            has_chat_template=True,
            chat_format=self.script.chat_format,
            speculation_modes=[pb.SPECULATION_MODE_SSD, pb.SPECULATION_MODE_OFF],
            max_speculation_depth=8,
            speculation_endpoints=[
                pb.SpeculationEndpoint(
                    address="127.0.0.1:7510", state="up", draft_name="tiny", open_sequences=3
                ),
                pb.SpeculationEndpoint(
                    address="gpu-2:7510", state="refused", reason="another tokenizer"
                ),
            ],
        )

    def _answer(self, request: pb.GenerateRequest, seed: int) -> list[tuple[int, bytes, str]]:
        """Each token with its own bytes, and with the text that it decides: the piece before its
        own; the last one decides its own, too."""
        if self.script.says is not None:
            data, decoder = (
                self.script.says(request).encode(),
                codecs.getincrementaldecoder("utf-8")(),
            )
            return [(byte, bytes([byte]), decoder.decode(bytes([byte]))) for byte in data]
        total = request.stop.max_tokens or self.script.tokens
        ids = full_tokens(total, seed + (request.speculation.mode if self.script.by_mode else 0))
        pieces = [piece(each) for each in ids]
        decided = ["".join(pieces[max(i - 1, 0) : i + (i == total - 1)]) for i in range(total)]
        if self.script.text is not None:
            decided = [self.script.text] * total
        return [(ids[i], pieces[i].encode(), decided[i]) for i in range(total)]

    def _goes_wrong(
        self, sent: int, resumed: bool, context: grpc.ServicerContext, done: threading.Event
    ) -> bool:
        script = self.script
        if script.exit_after == sent:
            time.sleep(0.05)  # what was sent before is to arrive
            os._exit(3)
        may_abort = script.abort_after and (script.abort_resumed or not resumed)
        if may_abort and script.abort_after[0] == sent:
            context.abort(*script.abort_after[1:])
        if script.hang_after == sent:
            self.hanging.set()
            done.wait()  # the client or the server ends the call
        if script.wait_after == sent:
            self.may_go_on.wait()
        return script.end_after == sent

    def _finish(self, total: int, seed: int) -> pb.GenerateResponse:
        finish = pb.GenerateFinish(
            reason=pb.FINISH_REASON_LENGTH if self.script.says is None else pb.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=4, completion_tokens=total, cached_prompt_tokens=2),
            seed=seed,
        )
        if self.script.speculation is not None:
            finish.speculation.CopyFrom(pb.SpeculationStats(**self.script.speculation))
        if self.script.stopped_by is not None:
            finish.reason = pb.FINISH_REASON_STOP
            kind = "stop_string" if isinstance(self.script.stopped_by, str) else "stop_token_id"
            setattr(finish, kind, self.script.stopped_by)
        return pb.GenerateResponse(finish=finish)

    def _ended(self, done: threading.Event) -> None:
        done.set()
        self.num_ended += 1
        if not self.ended_well.is_set():
            self.cancelled.set()


def _started(request, seed: int, script: Script) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=request.request_id or "made-up",
            seed=seed,
            prompt_tokens=4,
            model_fingerprint=script.fingerprint,
            beat_millis=script.beat_millis,
        )
    )


def _tokens(request, token_id: int, own: bytes, text: str) -> pb.GenerateResponse:
    tokens = pb.GenerateTokens(
        token_ids=[token_id],
        text=text,
        text_lengths=[len(text.encode())],
        origins=[pb.TOKEN_ORIGIN_CACHE],
    )
    if request.logprobs.chosen:
        logprobs = tokens.logprobs.add(chosen=-0.5, token=own)
        for rank in range(request.logprobs.top_n):
            logprobs.top.add(token_id=rank, logprob=float("-inf") if rank else -0.25)
    return pb.GenerateResponse(tokens=tokens)


def _later(code: int, message: str, delay_s: float | None, times: int = 1_000) -> Callable:
    """Refuses `times` calls, with a retry delay unless it is None."""
    left = iter(range(times))

    def refuse(context: grpc.ServicerContext) -> None:
        if next(left, None) is None:
            return
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int((delay_s or 0) * 1e9))
        details = [] if delay_s is None else [error_details_pb2.RetryInfo(retry_delay=delay)]
        _abort(context, code, message, details)

    return refuse


full = functools.partial(_later, code_pb2.RESOURCE_EXHAUSTED)
leaving = functools.partial(_later, code_pb2.UNAVAILABLE)


def invalid(message: str, field_name: str, description: str) -> Callable:
    """Refuses with INVALID_ARGUMENT and a field violation."""

    def refuse(context: grpc.ServicerContext) -> None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=field_name, description=description)
        _abort(context, code_pb2.INVALID_ARGUMENT, message, [bad])

    return refuse


def status(code: grpc.StatusCode, message: str) -> Callable:
    return lambda context: context.abort(code, message)


def silence(context: grpc.ServicerContext) -> None:
    """Says nothing until the caller has left."""
    left = threading.Event()
    if context.add_callback(left.set):
        left.wait()


def _abort(context: grpc.ServicerContext, code: int, message: str, details: list) -> None:
    told = status_pb2.Status(code=code, message=message)
    for detail in details:
        told.details.add().Pack(detail)
    context.abort_with_status(rpc_status.to_status(told))


@contextlib.contextmanager
def serve(
    script: Script | None = None,
    address: str = ANY,
    checks: health.HealthServicer | None = None,
) -> Iterator[ScriptedTarget]:
    """A running target; a given `address` may be held by the fixture `nobody`. It is ready, unless
    `checks` say otherwise."""
    server = grpc.server(
        futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", int(address != ANY))]
    )
    target = ScriptedTarget(script or Script(), server)
    if checks is None:
        checks = health.HealthServicer()
        checks.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    target.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    server.start()
    try:
        yield target
    finally:
        target.may_go_on.set()
        server.stop(0).wait()
