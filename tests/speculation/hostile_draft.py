"""A speculation endpoint that does what a script says, however wrong; and a port without gRPC."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb

SERVICE = "ssd.v1.SpeculationService"
PATIENCE = 30.0  # seconds that an endpoint keeps a stream open with nothing to say


@dataclass
class Visit:
    """One stream of a target, from hello on."""

    hello: pb.Hello
    context: grpc.ServicerContext
    messages: Iterator[pb.SpeculateRequest]

    def frames(self) -> Iterator[pb.TargetFrame]:
        """What the target says, until it is gone."""
        with contextlib.suppress(grpc.RpcError):
            for message in self.messages:
                yield from message.frames.frames

    def stay(self) -> None:
        """Say nothing, read nothing, as long as the target puts up with it."""
        gone = threading.Event()
        if self.context.add_callback(gone.set):
            gone.wait(PATIENCE)

    def welcome(self, **changes: Any) -> pb.SpeculateResponse:
        fields: dict[str, Any] = {
            "protocol_version": self.hello.protocol_version,
            "epoch": self.hello.epoch,
            "draft_name": "hostile",
            "speculator": pb.SPECULATOR_KIND_MODEL,
            "max_sequences": 64,
            "max_context": 4096,
            "max_depth": 8,
        }
        return pb.SpeculateResponse(welcome=pb.Welcome(**{**fields, **changes}))

    def say(self, *frames: pb.DraftFrame) -> pb.SpeculateResponse:
        return pb.SpeculateResponse(frames=pb.DraftFrames(epoch=self.hello.epoch, frames=frames))


Reply = pb.SpeculateResponse | bytes
Script = Callable[[Visit], Iterator[Reply]]


_ports: set[int] = set()


def fresh_port() -> int:
    """One that was not used before: a target remembers who misbehaved where."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return port


class HostileDraft:
    """Serves each visit by the script, and counts them."""

    def __init__(self, script: Script, ports: int = 1) -> None:
        """With several ports it is, to a target, as many endpoints."""
        self._script = script
        self.visits = 0
        self._server = grpc.server(
            ThreadPoolExecutor(8 * ports),
            options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)],
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._speculate,
            request_deserializer=pb.SpeculateRequest.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Speculate": method})
        self._server.add_generic_rpc_handlers((handlers,))
        addresses = [f"127.0.0.1:{fresh_port()}" for _ in range(ports)]
        self.addresses = [f"127.0.0.1:{self._server.add_insecure_port(a)}" for a in addresses]
        self.address = self.addresses[0]

    def _speculate(
        self, messages: Iterator[pb.SpeculateRequest], context: grpc.ServicerContext
    ) -> Iterator[Reply]:
        self.visits += 1
        yield from self._script(Visit(next(messages).hello, context, messages))

    def __enter__(self) -> "HostileDraft":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None)


class Port:
    """A port that speaks no gRPC."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, fresh_port()))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def was_dialled(self) -> bool:
        """Since it was made, or since somebody asked."""
        with contextlib.suppress(BlockingIOError):
            self._listener.accept()[0].close()
            return True
        return False

    def __enter__(self) -> "Port":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


# What a hostile endpoint says, for the scripts.


def branches(frame: pb.TargetFrame, *pushes: pb.Branch, **changes: Any) -> pb.DraftFrame:
    """Pushes for the round that a frame names, or for another one."""
    name: dict[str, Any] = {"sequence": frame.sequence, "round": frame.round, **changes}
    return pb.DraftFrame(**name, branches=pb.Branches(branches=pushes))


def notice(frame: pb.TargetFrame, kind: int, reason: str = "because") -> pb.DraftFrame:
    body = pb.Notice(kind=kind, reason=reason)  # type: ignore[arg-type]
    return pb.DraftFrame(sequence=frame.sequence, round=frame.round, notice=body)


def begins_round(frame: pb.TargetFrame) -> bool:
    return frame.WhichOneof("body") in ("open", "launch")


def _answer(say: Callable[[Visit, pb.TargetFrame], Iterator[Reply]]) -> Script:
    """Welcome, then an answer to each round that begins."""

    def script(visit: Visit) -> Iterator[Reply]:
        yield visit.welcome()
        for frame in visit.frames():
            if begins_round(frame):
                yield from say(visit, frame)

    return script


def _notices(kind: int) -> Script:
    return _answer(lambda visit, frame: iter([visit.say(notice(frame, kind))]))


def _refuse(code: grpc.StatusCode, details: Callable[[], str]) -> Script:
    def script(visit: Visit) -> Iterator[Reply]:
        visit.context.abort(code, details())
        yield b""

    return script


def _then(*replies: Callable[[Visit], Reply]) -> Script:
    """These messages, and then silence."""

    def script(visit: Visit) -> Iterator[Reply]:
        for reply in replies:
            yield reply(visit)
        visit.stay()

    return script


def _flood(reply: Callable[[Visit], Reply]) -> Script:
    """Welcome, then one message for ever, as fast as it goes."""

    def script(visit: Visit) -> Iterator[Reply]:
        yield visit.welcome()
        message = reply(visit)
        while True:
            yield message

    return script


def _wrong_rounds(visit: Visit, frame: pb.TargetFrame) -> Iterator[Reply]:
    for number in (frame.round + 1, frame.round + 1000, max(0, frame.round - 1), 2**32 - 1):
        push = pb.Branch(accepted=0, token=7, tokens=[7, 7, 7])
        yield visit.say(branches(frame, push, round=number))


def _unknown_sequences(visit: Visit, frame: pb.TargetFrame) -> Iterator[Reply]:
    for number in (frame.sequence + 12345, 2**64 - 1):
        yield visit.say(
            branches(frame, pb.Branch(token=7, tokens=[7]), sequence=number),
            pb.DraftFrame(sequence=number, notice=pb.Notice(kind=pb.NOTICE_KIND_LOST)),
        )


def _foreign_tokens(visit: Visit, frame: pb.TargetFrame) -> Iterator[Reply]:
    wrong = (visit.hello.vocab_size, 2**31, 2**32 - 1)
    pushes = [pb.Branch(token=token, tokens=[1]) for token in wrong]
    pushes += [pb.Branch(token=1, tokens=[1, token]) for token in wrong]
    pushes += [pb.Branch(accepted=2**32 - 1, token=1, tokens=[1])]
    yield visit.say(branches(frame, *pushes))


def _guesses(visit: Visit, frame: pb.TargetFrame) -> Iterator[Reply]:
    """Branches for all tokens that are often right, with continuations that never are."""
    length = len((frame.open if frame.HasField("open") else frame.launch).speculation)
    yield visit.say(
        branches(
            frame,
            *(
                pb.Branch(accepted=a, token=token, tokens=[visit.hello.vocab_size - 1] * 8)
                for a in range(length + 1)
                for token in range(800 // (length + 1))
            ),
        )
    )


def _duplicates_and_gaps(visit: Visit, frame: pb.TargetFrame) -> Iterator[Reply]:
    for tokens in ([5, 6], [6, 5], [9, 9, 9]):
        yield visit.say(
            branches(
                frame,
                *(pb.Branch(token=t, start=s, tokens=tokens) for t in (3, 4) for s in (4, 0, 1)),
            )
        )


def _garbage_later(visit: Visit) -> Iterator[Reply]:
    """Plausible for some rounds, then no message at all."""
    yield visit.welcome()
    for number, frame in enumerate(visit.frames()):
        if begins_round(frame):
            yield from _guesses(visit, frame)
        if number > 40:
            yield b"\xff\x00garbage" * 100


def _close_after_welcome(visit: Visit) -> Iterator[Reply]:
    yield visit.welcome()


def _wide(visit: Visit) -> Reply:
    """A large message that keeps every limit."""
    push = pb.Branch(token=1, tokens=[visit.hello.vocab_size - 1] * 60)
    frame = pb.TargetFrame(sequence=1)
    return visit.say(*(branches(frame, *[push] * 100) for _ in range(40)))


def _many_empty(visit: Visit) -> Reply:
    """Nothing but the names of branches: cheap to send, dear to read."""
    frame = pb.TargetFrame(sequence=1)
    return visit.say(*(branches(frame, *[pb.Branch()] * 4000) for _ in range(4)))


SCRIPTS: dict[str, Script] = {
    # No link
    "another protocol": _then(lambda visit: visit.welcome(protocol_version=99)),
    "no room at all": _then(lambda visit: visit.welcome(max_sequences=0)),
    "another epoch": _then(lambda visit: visit.welcome(epoch=visit.hello.epoch + 1)),
    "frames before welcome": _then(lambda visit: visit.say()),
    "nothing for hello": _then(lambda visit: b""),
    "garbage for hello": _then(lambda visit: b"\xff\xff\xff\xff"),
    "never answers hello": _then(),
    "another vocabulary": _refuse(
        grpc.StatusCode.FAILED_PRECONDITION, lambda: "vocab_size: the target has another one"
    ),
    "a new excuse each time": _refuse(
        grpc.StatusCode.UNAVAILABLE, lambda: f"not now\n\x1b[31m, but at {time.monotonic()}"
    ),
    # A link that ends
    "closes after welcome": _close_after_welcome,
    "welcomes twice": _then(Visit.welcome, Visit.welcome),
    "an empty message": _then(Visit.welcome, lambda visit: b""),
    "garbage later": _garbage_later,
    "a huge message": _then(Visit.welcome, lambda visit: b"\x00" * (5 * 1024 * 1024)),
    "too many frames": _then(
        Visit.welcome,
        lambda visit: visit.say(*[pb.DraftFrame(notice=pb.Notice(reason="x"))] * 5000),
    ),
    "a frame without a body": _then(Visit.welcome, lambda visit: visit.say(pb.DraftFrame())),
    "an unknown notice": _notices(99),
    "never answers a round": _then(Visit.welcome),
    "floods": _flood(_wide),
    "floods with empty branches": _flood(_many_empty),
    "floods with empty messages": _flood(lambda visit: visit.say()),
    # A link that stays
    "wrong rounds": _answer(_wrong_rounds),
    "unknown sequences": _answer(_unknown_sequences),
    "foreign tokens": _answer(_foreign_tokens),
    "wrong guesses": _answer(_guesses),
    "duplicates and gaps": _answer(_duplicates_and_gaps),
    "all is lost": _notices(pb.NOTICE_KIND_LOST),
    "always busy": _notices(pb.NOTICE_KIND_BUSY),
    "refuses everything": _notices(pb.NOTICE_KIND_REFUSED),
    "always leaving": _notices(pb.NOTICE_KIND_LEAVING),
}
