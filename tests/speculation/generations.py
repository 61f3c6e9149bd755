"""Generations side by side, while something happens to their drafts; and their plain texts."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd.v1 import speculation_pb2
from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.processes import (
    PATIENT,
    DraftProcess,
    Output,
    TargetProcess,
    collect,
    draft,
    wait_until_ready,
)
from tests.waiting import wait_until

OFF, SYNC, SSD = (
    pb.SPECULATION_MODE_OFF,
    pb.SPECULATION_MODE_SYNC,
    pb.SPECULATION_MODE_SSD,
)
METRICS = ("--metrics-listen", "127.0.0.1:0")
# Drafts are held still here, and nobody waits longer than this for one that is.
WAITS_2_SECONDS = (*PATIENT, "--wait", "2000")
STORY = "Once upon a time there was"
CALL_SECONDS = 120  # generous: the machine may be busy


def request(
    seed: int,
    max_tokens: int = 40,
    text: str = STORY,
    speculation: dict[str, Any] | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """A third of the seeds takes the most likely token, the others draw."""
    options = {"temperature": (0.0, 0.8, 1.0)[seed % 3], **sampling}
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingOptions(seed=seed, **options),
        stop=pb.StopOptions(max_tokens=max_tokens, ignore_eos=True),
        speculation=pb.SpeculationOptions(**(speculation or {"mode": SSD})),
    )


def with_speculation(message: pb.GenerateRequest, **options: Any) -> pb.GenerateRequest:
    """The same request, sped up in another way."""
    changed = pb.GenerateRequest()
    changed.CopyFrom(message)
    changed.speculation.CopyFrom(pb.SpeculationOptions(**options))
    return changed


def generate(server: TargetProcess, message: pb.GenerateRequest) -> Output:
    with server.channel() as channel:
        return collect(rpc.TargetServiceStub(channel).Generate(message, timeout=CALL_SECONDS))


def violation(
    server: TargetProcess, message: pb.GenerateRequest
) -> error_details_pb2.BadRequest.FieldViolation:
    """Of a request that is refused for one of its fields."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(server, message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    detail = error_details_pb2.BadRequest()
    assert rpc_status.from_call(caught.value).details[0].Unpack(detail)
    [found] = detail.field_violations
    return found


class Generations:
    """Requests that run at the same time, from ``with`` on; at its end all have ended."""

    def __init__(self, server: TargetProcess, messages: Sequence[pb.GenerateRequest]) -> None:
        self._server = server
        self._messages = messages
        self._pool = ThreadPoolExecutor(len(messages))
        self._counts = [0] * len(messages)  # tokens so far
        self.outputs: list[Output] = []

    def __enter__(self) -> "Generations":
        self._stub = self._server.stub()
        self._futures = [self._pool.submit(self._follow, i) for i in range(len(self._messages))]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.outputs = [future.result() for future in self._futures]
        finally:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def _follow(self, index: int) -> Output:
        stream = self._stub.Generate(self._messages[index], timeout=CALL_SECONDS)
        return collect(self._counted(index, stream))

    def _counted(
        self, index: int, stream: Iterator[pb.GenerateResponse]
    ) -> Iterator[pb.GenerateResponse]:
        for response in stream:
            self._counts[index] += len(response.tokens.token_ids)
            yield response

    def until_each_has(self, tokens: int) -> None:
        wait_until(lambda: all(c >= tokens for c in self._counts) or self._failed())

    def until_ended(self) -> None:
        wait_until(lambda: not self.running)

    def _failed(self) -> bool:
        return any(future.done() and future.exception() for future in self._futures)

    @property
    def running(self) -> int:
        return sum(not future.done() for future in self._futures)

    def texts(self) -> list[tuple[str, list[int]]]:
        return [(output.text, output.tokens) for output in self.outputs]

    def stats(self) -> list[pb.SpeculationStats]:
        return [output.finish.speculation for output in self.outputs]


def said(output: Output) -> tuple[object, ...]:
    """All of an answer that is the same in every mode."""
    finish, stop = output.finish, output.finish.WhichOneof("stopped_by")
    ended = (finish.reason, stop, finish.stop_string, finish.stop_token_id)
    return output.text, output.tokens, output.seed, finish.seed, *ended


class PlainTexts:
    """What plain decoding gives on a server, computed once for each request."""

    def __init__(self, server: TargetProcess) -> None:
        self._server = server
        self._known: dict[bytes, tuple[str, list[int]]] = {}

    def of(self, messages: Sequence[pb.GenerateRequest]) -> list[tuple[str, list[int]]]:
        plain = [with_speculation(message, mode=OFF) for message in messages]
        keys = [message.SerializeToString(deterministic=True) for message in plain]
        new = {k: m for k, m in zip(keys, plain, strict=True) if k not in self._known}
        if new:
            with Generations(self._server, list(new.values())) as running:
                pass
            self._known.update(zip(new, running.texts(), strict=True))
        return [self._known[key] for key in keys]


def looked_up(stats: pb.SpeculationStats) -> int:
    """Rounds of a sequence that an endpoint held, be it in time for them or not."""
    misses = stats.length_misses + stats.token_misses
    return stats.hits + stats.late + stats.stale + misses


def from_endpoints(stats: Sequence[pb.SpeculationStats]) -> int:
    """Tokens that endpoints had said and that were right, in time or waited for."""
    assert not any(each.ngram_rounds or each.sync_rounds for each in stats)
    return sum(each.accepted_tokens for each in stats)


def wait_until_up(server: TargetProcess, address: str) -> None:
    wait_until(lambda: is_up(server, address), server.log)


def endpoint(server: TargetProcess, address: str) -> pb.SpeculationEndpoint | None:
    """How a target sees an endpoint."""
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    return next((e for e in info.speculation_endpoints if e.address == address), None)


def is_up(server: TargetProcess, address: str) -> bool:
    found = endpoint(server, address)
    return found is not None and found.state == "up"


def draft_info(server: DraftProcess) -> speculation_pb2.GetDraftInfoResponse:
    request = speculation_pb2.GetDraftInfoRequest()
    info: speculation_pb2.GetDraftInfoResponse = server.stub().GetDraftInfo(request, timeout=30)
    return info


def is_empty(server: DraftProcess) -> bool:
    """No sequence, no block held, none promised."""
    metrics = server.metrics()
    names = ("sequences_active", "draft_kv_cache_usage_ratio", "draft_kv_cache_reserved_blocks")
    return all(metrics[f"ssd_{name}"] == 0 for name in names)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def resident_mib(pid: int) -> float:
    """Of a process and all below it."""
    pages = [int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in family(pid)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


class LastingDraft:
    """A draft that may be stopped, killed and started again on its port."""

    def __init__(self, directory: Path, *flags: str, **options: Any) -> None:
        self._directory = directory
        self._flags = flags
        self._options = options
        self._lives = contextlib.ExitStack()
        self._count = 0
        self._listen = "127.0.0.1:0"
        self._stopped: list[int] = []

    def __enter__(self) -> "LastingDraft":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lives.close()

    def start(self) -> None:
        """Returns when it listens; it is not ready then."""
        self._count += 1
        directory = self._directory / str(self._count)
        flags = (*METRICS, *self._flags, "--listen", self._listen)
        self.process = self._lives.enter_context(
            draft(directory, *flags, ready=False, **self._options)
        )
        self.address = self._listen = self.process.address

    def wait_until_ready(self) -> None:
        wait_until_ready(self.process)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stopped as with Ctrl-Z, engine included; at the end, or with ``go_on``, it goes on."""
        self._stopped = family(self.process.process.pid)
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self.go_on()

    def go_on(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)


@dataclass
class Pair:
    """A target and its draft that the tests of this folder share."""

    target: TargetProcess
    draft: LastingDraft
    plain: PlainTexts

    def generate_from_cache(self, messages: Sequence[pb.GenerateRequest]) -> list[Output]:
        """Again and again until a branch was there before it was asked for.

        Each time the texts are those of plain decoding, with tokens of endpoints in them.
        """
        while True:
            with Generations(self.target, messages) as running:
                pass
            assert running.texts() == self.plain.of(messages)
            assert from_endpoints(running.stats()) > 0
            if any(stats.cache_tokens for stats in running.stats()):
                return running.outputs

    def in_every_mode(
        self, messages: Sequence[pb.GenerateRequest], together: int = 30
    ) -> list[list[Output]]:
        """So many at a time; the answers of each request are held to be equal."""
        wait_until_up(self.target, self.draft.address)
        modes, outputs = [OFF, SYNC, SSD], []
        each = [with_speculation(message, mode=m) for message in messages for m in modes]
        for begin in range(0, len(each), together):
            with Generations(self.target, each[begin : begin + together]) as running:
                pass
            outputs += running.outputs
        rows = [outputs[i : i + 3] for i in range(0, len(outputs), 3)]
        for plain, *others in rows:
            assert all(said(other) == said(plain) for other in others)
        return rows
