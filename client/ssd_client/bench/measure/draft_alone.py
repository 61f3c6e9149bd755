"""A draft timed alone: this process speaks to it as a target would, and computes nothing itself."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import Endpoint
from ssd_client.errors import ClientError, failure_of
from ssd_client.generate.request import pack_token_ids

_PROTOCOL = 1
_SEQUENCE = 1
_QUIET_S = 0.08  # after which nothing more is expected of a round; a verification if that is longer
_PATIENCE_S = 30.0  # for one round
_FIRST = 2  # rounds that do not count
_ROUNDS = 12  # that do


@dataclass(frozen=True)
class DraftTimes:
    """Seconds, as they are seen from here, the way there and back included."""

    tree: float  # from a launch to the last depth of its branches
    backup: float  # from an outcome that nobody foresaw to a speculation that continues it


@dataclass(frozen=True)
class Round:
    """The rounds that are timed, as a target would describe them."""

    prompt: Sequence[int]
    depth: int
    verify_s: float


def time_draft(
    endpoint: Endpoint, target: target_pb2.GetModelInfoResponse, about: Round
) -> DraftTimes:
    """A tree after a hit and a backup after a miss, in turns."""
    with contextlib.closing(_Link(endpoint, target, about)) as link:
        trees, backups = [], []
        link.greet()
        link.open()
        for _ in range(_ROUNDS + _FIRST):
            trees.append(link.hit())
            backups.append(link.miss())
        return DraftTimes(statistics.median(trees[_FIRST:]), statistics.median(backups[_FIRST:]))


class _Link:
    def __init__(
        self, endpoint: Endpoint, target: target_pb2.GetModelInfoResponse, about: Round
    ) -> None:
        self._endpoint, self._about = endpoint, about
        self._vocab_size = target.vocab_size
        self._outbox: queue.SimpleQueue[pb.SpeculateRequest | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[pb.SpeculateResponse | grpc.RpcError] = queue.SimpleQueue()
        self._round = 0
        self._branches: dict[tuple[int, int], list[int]] = {}
        self._quiet_s = max(_QUIET_S, about.verify_s)
        self._deadline = time.monotonic() + _PATIENCE_S
        self._call = endpoint.draft.Speculate(self._requests())
        threading.Thread(target=self._read, name="draft alone", daemon=True).start()
        hello = pb.Hello(
            protocol_version=_PROTOCOL,
            oldest_protocol_version=_PROTOCOL,
            epoch=1,
            target_name="ssd-client bench",
            tokenizer_fingerprint=target.tokenizer_fingerprint,
            vocab_size=target.vocab_size,
            max_depth=about.depth,
        )
        self._outbox.put(pb.SpeculateRequest(hello=hello))

    def greet(self) -> None:
        if self._next(_PATIENCE_S) is None:
            raise self._silent()

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()

    def open(self) -> None:
        self._tell(
            open=pb.Open(
                prompt=pack_token_ids(self._about.prompt),
                max_tokens=len(self._about.prompt) + 1024,
                sampling=target_pb2.SamplingOptions(temperature=0, seed=0),
                verification=target_pb2.VERIFICATION_MODE_COUPLED,
                down_weight=1.0,
                depth=self._about.depth,
                verify_micros=self._micros,
            )
        )
        self._hear_all()

    def hit(self) -> float:
        """The branch that has most tokens right is taken; seconds to the tree after it."""
        outcome, tokens = max(self._branches.items(), key=lambda each: (each[0][0], len(each[1])))
        self._tell(outcome=pb.Outcome(accepted=outcome[0], token=outcome[1]))
        return self._launch(tokens, pb.SPECULATION_SOURCE_CACHE)

    def miss(self) -> float:
        """An outcome that was not foreseen; seconds to what continues it, which is then taken."""
        begin = time.monotonic()
        foreseen = {token for _, token in self._branches}
        token = next(t for t in range(self._vocab_size // 2, 0, -1) if t not in foreseen)
        self._branches = {}
        self._tell(outcome=pb.Outcome(accepted=0, token=token))
        while len(self._branches.get((0, token), ())) < self._about.depth:
            self._hear(_PATIENCE_S)
            if time.monotonic() > self._deadline:
                raise self._silent()
        seconds = time.monotonic() - begin
        self._launch(self._branches[0, token], pb.SPECULATION_SOURCE_JUST_IN_TIME)
        return seconds

    def _launch(self, tokens: Sequence[int], source: pb.SpeculationSource) -> float:
        self._round += 1
        self._branches = {}
        self._tell(
            launch=pb.Launch(
                speculation=tokens[: self._about.depth],
                source=source,
                depth=self._about.depth,
                verify_micros=self._micros,
            )
        )
        return self._hear_all()

    def _hear_all(self) -> float:
        """Hears messages until no more come; returns the seconds to the last."""
        begin = last = time.monotonic()
        while not self._branches or time.monotonic() - last < self._quiet_s:
            if self._hear(self._quiet_s):
                last = time.monotonic()
            if time.monotonic() > self._deadline:
                raise self._silent()
        return last - begin

    def _silent(self) -> ClientError:
        return ClientError(f"{self._endpoint.address}: the draft does not answer")

    def _hear(self, seconds: float) -> bool:
        """Hears one message; returns whether it brought tokens."""
        message = self._next(seconds)
        if message is None:
            return False
        brought = [self._take(frame) for frame in message.frames.frames]
        return any(brought)

    def _take(self, frame: pb.DraftFrame) -> bool:
        if frame.WhichOneof("body") == "notice":
            raise ClientError(f"{self._endpoint.address}: {frame.notice.reason}")
        if frame.round != self._round:
            return False
        for branch in frame.branches.branches:
            known = self._branches.setdefault((branch.accepted, branch.token), [])
            known += branch.tokens[len(known) - branch.start :]
        return bool(frame.branches.branches)

    @property
    def _micros(self) -> int:
        return int(1e6 * self._about.verify_s)

    def _tell(self, **body: Any) -> None:
        """Sends one of the bodies of a frame, by its name."""
        self._deadline = time.monotonic() + _PATIENCE_S
        frame = pb.TargetFrame(sequence=_SEQUENCE, round=self._round, **body)
        frames = pb.TargetFrames(epoch=1, frames=[frame])
        self._outbox.put(pb.SpeculateRequest(frames=frames))

    def _requests(self) -> Iterator[pb.SpeculateRequest]:
        while (request := self._outbox.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for response in self._call:
                self._inbox.put(response)
        except grpc.RpcError as error:
            self._inbox.put(error)

    def _next(self, seconds: float) -> pb.SpeculateResponse | None:
        """The next message; None where nothing comes in time."""
        try:
            found = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, grpc.RpcError):
            raise failure_of(found, self._endpoint.address, admitted=False)
        return found
