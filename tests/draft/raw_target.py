"""One side of a link to a draft that is a process, by hand; a message may be any bytes."""

import contextlib
import queue
from collections.abc import Iterator

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.front.service import SERVICE
from tests.draft.scripted_draft import frames, hello
from tests.processes import DraftProcess
from tests.speculation.generations import draft_info
from tests.waiting import HANG_SECONDS


def fitting(server: DraftProcess) -> pb.SpeculateRequest:
    """The hello of a target that this draft welcomes."""
    info = draft_info(server)
    return hello(tokenizer_fingerprint=info.tokenizer_fingerprint, vocab_size=info.vocab_size)


class RawTarget:
    def __init__(self, server: DraftProcess, greeting: pb.SpeculateRequest | None = None) -> None:
        """It fits, unless it greets otherwise."""
        self._outbox: queue.Queue[bytes | None] = queue.Queue(64)
        self._channel = server.channel()
        speculate = self._channel.stream_stream(
            f"/{SERVICE}/Speculate", response_deserializer=pb.SpeculateResponse.FromString
        )
        self.call = speculate(iter(self._outbox.get, None), timeout=HANG_SECONDS)
        self.write((greeting or fitting(server)).SerializeToString())

    def __enter__(self) -> "RawTarget":
        assert self.welcome()
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self._channel.close()

    def welcome(self) -> pb.Welcome:
        message = next(self.call)
        assert message.HasField("welcome")
        return message.welcome

    def write(self, data: bytes | None) -> None:
        self._outbox.put(data, timeout=HANG_SECONDS)

    def try_send(self, *parts: pb.TargetFrame) -> None:
        """What finds no place is dropped: whoever floods does not wait."""
        with contextlib.suppress(queue.Full):
            self._outbox.put(frames(*parts).SerializeToString(), timeout=0.01)

    def heard(self) -> Iterator[pb.DraftFrame]:
        for response in self.call:
            yield from response.frames.frames

    def leave(self) -> None:
        self.write(None)

    def end(self) -> grpc.StatusCode:
        """Read to the end: a status comes after all that was said."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        code: grpc.StatusCode = self.call.code()
        return code
