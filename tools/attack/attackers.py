"""Callers who mean no good; each goes on until its process is killed.

python -m tools.attack.attackers NAME HOST:PORT
"""

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ssd.v1 import speculation_pb2 as draft_pb
from ssd.v1 import speculation_pb2_grpc as draft_rpc
from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_engine.text.token_ids import pack_tokens
from tools.attack.afar import connect, forwarded
from tools.attack.callers import (
    ATTACKER,
    OTHERS_PROMPTS,
    UNLIMITED,
    bearer,
    others_prompt,
    request,
)
from tools.attack.gateway_attackers import GATEWAY_ATTACKS

THREADS = 8
IDLE_CONNECTIONS, STRANGERS, SILENT_CALLS, LONG_PROMPTS = 1050, 192, 70, 20
NICE = 10  # an attacker's own work is done on another machine
LOOKED_UP = 100_000  # tokens of a sequence at a draft


def channel_to(address: str) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    return grpc.insecure_channel(forwarded(address), options)


def on_threads(count: int, act: Callable[[int], None]) -> None:
    """Each of them acts for ever."""

    def go_on(number: int) -> None:
        while True:
            act(number)

    threads = [threading.Thread(target=go_on, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cancel_storm(address: str) -> None:
    """Requests that are cancelled as soon as they have begun, one after the other."""
    stub = rpc.TargetServiceStub(channel_to(address))

    def act(_: int) -> None:
        call = stub.Generate(request("word " * 50, tokens=500), metadata=bearer(ATTACKER))
        with contextlib.suppress(grpc.RpcError):
            next(call)
        call.cancel()

    on_threads(THREADS, act)


def huge_prompts(address: str) -> None:
    """8 MB of somebody who may send 100 tokens, and as much as a context may have at most."""
    stub = rpc.TargetServiceStub(channel_to(address))
    huge, long = "word " * 1_600_000, "word " * 100_000

    def act(number: int) -> None:
        text, token = (huge, ATTACKER) if number % 2 else (long, UNLIMITED)
        with contextlib.suppress(grpc.RpcError):
            for _ in stub.Generate(request(text), metadata=bearer(token)):
                pass

    on_threads(4, act)


def long_prompts(address: str, words: int = 1_900) -> None:
    stub = rpc.TargetServiceStub(channel_to(address))
    numbers = itertools.count()

    def act(_: int) -> None:
        message = request(f"{next(numbers)} " + "word " * words, tokens=4)
        with contextlib.suppress(grpc.RpcError):
            for _ in stub.Generate(message, metadata=bearer(UNLIMITED)):
                pass

    on_threads(LONG_PROMPTS, act)


def idle_connections(address: str, number: int = IDLE_CONNECTIONS) -> None:
    """Connections that say nothing; what is hung up comes back."""
    held: list[object] = []
    while True:
        with contextlib.suppress(OSError):
            held.append(connect(address))
        if len(held) > number:
            held = held[number // 2 :]
            time.sleep(0.5)


def strangers(address: str) -> None:
    idle_connections(address, STRANGERS)


def silent_health_calls(address: str) -> None:
    """Calls that never send their request."""
    check = channel_to(address).stream_stream("/grpc.health.v1.Health/Check")

    def act(_: int) -> None:
        ended = threading.Event()

        def nothing() -> Iterator[bytes]:
            ended.wait()
            yield from ()

        with contextlib.suppress(grpc.RpcError):
            list(check(nothing()))
        ended.set()  # else its thread would stay
        time.sleep(0.1)

    on_threads(SILENT_CALLS, act)


def strange(number: int) -> str:
    return others_prompt(number).replace("secret", "purple")


def guessed_prompts(address: str) -> None:
    """Prompts of the others, and ones that nobody has sent, each once; says what it was told."""
    stub = rpc.TargetServiceStub(channel_to(address))
    for number in range(OTHERS_PROMPTS):
        for what, prompt in (
            ("guessed", others_prompt(number)),
            ("strange", strange(number)),
        ):
            first, cached, begin = 0.0, 0, time.monotonic()
            for response in stub.Generate(request(prompt, 2), metadata=bearer(UNLIMITED)):
                event = response.WhichOneof("event")
                if event == "tokens":
                    first = first or time.monotonic() - begin
                elif event == "finish":
                    cached = response.finish.usage.cached_prompt_tokens
            print(what, cached, 1e3 * first, flush=True)
    time.sleep(3600)


def long_look_ups(address: str) -> None:
    """A target that opens long sequences at a draft, again and again."""
    link = HandMadeLink(channel_to(address))
    for number in itertools.count():
        link.open(number % 32, [5 + (number + i) % 1000 for i in range(LOOKED_UP)])
        time.sleep(0.02)


class HandMadeLink:
    """A link to a draft, without a target behind it."""

    def __init__(self, channel: grpc.Channel) -> None:
        stub = draft_rpc.SpeculationServiceStub(channel)
        info = stub.GetDraftInfo(draft_pb.GetDraftInfoRequest())
        self._outbox: queue.Queue[draft_pb.SpeculateRequest] = queue.Queue(8)
        self._call = stub.Speculate(iter(self._outbox.get, None))
        hello = draft_pb.Hello(
            protocol_version=1,
            oldest_protocol_version=1,
            epoch=1,
            target_name="by hand",
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size or 4096,
            max_depth=5,
        )
        self._outbox.put(draft_pb.SpeculateRequest(hello=hello))
        next(self._call)
        self._answered: queue.Queue[int] = queue.Queue()
        self.refused: list[int] = []  # sequences that the draft does not hold, or gave up
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                for frame in response.frames.frames:
                    if frame.branches.branches:
                        self._answered.put(frame.sequence)
                    elif frame.HasField("notice"):
                        self.refused.append(frame.sequence)

    def open(self, sequence: int, prompt: list[int]) -> None:
        opened = draft_pb.Open(
            prompt=pack_tokens(prompt),
            max_tokens=len(prompt) + 100,
            sampling=pb.SamplingOptions(seed=1, temperature=0.0),
            verification=pb.VERIFICATION_MODE_COUPLED,
            depth=5,
        )
        self._send(draft_pb.TargetFrame(sequence=sequence, round=0, open=opened))

    def close(self, sequence: int) -> None:
        self._send(draft_pb.TargetFrame(sequence=sequence, round=0, close=draft_pb.Close()))

    def _send(self, frame: draft_pb.TargetFrame) -> None:
        frames = draft_pb.TargetFrames(epoch=1, frames=[frame])
        self._outbox.put(draft_pb.SpeculateRequest(frames=frames))

    def wait_for(self, sequence: int, seconds: float = 60.0) -> None:
        while self._answered.get(timeout=seconds) != sequence:
            pass


ATTACKS: dict[str, Callable[..., None]] = {
    act.__name__: act
    for act in (
        cancel_storm,
        huge_prompts,
        long_prompts,
        idle_connections,
        strangers,
        silent_health_calls,
        guessed_prompts,
        long_look_ups,
    )
} | GATEWAY_ATTACKS


if __name__ == "__main__":
    os.nice(NICE)
    ATTACKS[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
