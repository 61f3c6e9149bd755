"""Clients of all kinds: patient, slow, silent, hasty, wrong. Each finished text is checked."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tools.attack.callers import OTHER, bearer
from tools.soak.requests import (
    CALL_SECONDS,
    OFF,
    SSD,
    Known,
    code_of,
    endless,
    resumed,
    sped_up,
    wrong,
)

LOGPROB_TOLERANCE = 1e-3
CHANNEL_CALLS = 25  # after which a client connects anew
MAX_PROBLEMS = 50
# A connection that takes little ahead of its reader.
NARROW = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
]
NEVER_SECONDS = 30  # in which a connection is full, and its writer gives up


class Mismatch(Exception):
    """A text that is not the one of plain decoding."""


class Load:
    """Clients on threads, from ``start`` to ``stop``."""

    def __init__(self, addresses: Sequence[str], pool: Sequence[Known], seed: int) -> None:
        self._addresses = addresses
        self._pool = pool
        self._seed = seed
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def start(self, clients: int) -> None:
        self._stopping.clear()
        self._threads = [
            threading.Thread(target=self._guarded, args=(number,), name=f"client-{number}")
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._seed += len(self._threads)

    def crowd(self, known: Sequence[Known]) -> None:
        """All of these at once, at every target."""
        for address in self._addresses:
            with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(len(known)) as pool:
                stub, draw = rpc.TargetServiceStub(channel), random.Random(self._seed)
                client = Client(self, address, stub, known, draw, self._stopping)
                try:
                    list(pool.map(client.finish, known))
                except (grpc.RpcError, Mismatch) as error:
                    self.problem(f"one of a crowd: {error!r}")

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount

    def problem(self, text: str) -> None:
        with self._lock:
            self.counts["problems"] += 1
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(text)

    def _guarded(self, number: int) -> None:
        try:
            self._run(number)
        except Exception as error:  # a client that is gone would load nothing any more
            self.problem(f"client {number} ended: {error!r}")

    def _run(self, number: int) -> None:
        draw = random.Random(self._seed + number)
        first: int | None = number  # of the kinds: each has its turn, however short the load
        while not self._stopping.is_set():
            address = draw.choice(self._addresses)
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(address, options=options) as channel:
                stub = rpc.TargetServiceStub(channel)
                client = Client(self, address, stub, self._pool, draw, self._stopping)
                for _ in range(CHANNEL_CALLS):
                    if self._stopping.is_set():
                        break
                    client.act(first)
                    first = None


class Client:
    def __init__(
        self,
        load: Load,
        address: str,
        stub: rpc.TargetServiceStub,
        pool: Sequence[Known],
        draw: random.Random,
        stopping: threading.Event,
    ) -> None:
        self._load, self._stub, self._pool, self._draw = load, stub, pool, draw
        self._stopping = stopping
        self._address = address
        self._acts: dict[str, tuple[float, Callable[[], None]]] = {
            "finished": (10, self._finish),
            "resumed": (3, self._resume),
            "rejection": (2, self._reject),
            "cancelled": (3, self._cancel),
            "deadline": (2, self._hurry),
            "slow reader": (2, self._read_slowly),
            "bad request": (2, self._bad),
            "never reader": (0.4, self._never_read),
        }

    def act(self, which: int | None = None) -> None:
        """One of the kinds by number, or by chance."""
        names, weights = list(self._acts), [weight for weight, _ in self._acts.values()]
        (name,) = self._draw.choices(names, weights)
        if which is not None:
            name = names[which % len(names)]
        self._load.count("requests")
        self._load.count(f"asked: {name}")
        try:
            self._acts[name][1]()
        except grpc.RpcError as error:
            code = code_of(error)
            self._load.count(f"failed: {name}: {code}")
            if code == "resource_exhausted":  # full: that is what admission is for
                time.sleep(0.2)
            else:
                self._load.problem(f"{name}: {code}: {error.details()}")
        except Mismatch as error:
            self._load.count(f"mismatch: {name}")
            self._load.problem(f"{name}: {error}")

    def _speculation(self) -> dict[str, object]:
        mode = self._draw.choices((SSD, OFF), (5, 1))[0]
        return {"mode": mode, "depth": self._draw.choice((0, 0, 1, 3))}

    def _call(self, message: pb.GenerateRequest, timeout: float = CALL_SECONDS) -> grpc.Call:
        return self._stub.Generate(message, timeout=timeout, metadata=bearer(OTHER))

    def _read(self, call: grpc.Call, known: Known | None, pause_s: float = 0.0) -> int:
        """To its end; returns the number of tokens."""
        text, tokens, logprobs, finish = "", [], [], None
        for response in call:
            text += response.tokens.text
            tokens += response.tokens.token_ids
            logprobs += [each.chosen for each in response.tokens.logprobs]
            finish = response.finish if response.WhichOneof("event") == "finish" else None
            if pause_s:
                time.sleep(pause_s)
        if finish is None:
            raise Mismatch("the stream ended without a finish")
        self._load.count("tokens", len(tokens))
        self._load.count("tokens from the cache", finish.speculation.cache_tokens)
        if known is not None:
            _check(known, text, tokens, logprobs)
            self._load.count("texts checked")
        return len(tokens)

    def _finish(self) -> None:
        self.finish(self._draw.choice(self._pool))

    def finish(self, known: Known) -> None:
        self._read(self._call(sped_up(known.message, **self._speculation())), known)

    def _resume(self) -> None:
        known = self._draw.choice([each for each in self._pool if len(each.tokens) > 1])
        rest = resumed(known, self._draw.randrange(1, len(known.tokens)))
        self._read(self._call(sped_up(rest.message, **self._speculation())), rest)

    def _reject(self) -> None:
        """Its text depends on time; that it comes does not."""
        known = self._draw.choice(self._pool)
        options = {"mode": SSD, "verification": pb.VERIFICATION_MODE_REJECTION}
        self._read(self._call(sped_up(known.message, **options)), None)

    def _cancel(self) -> None:
        known = self._draw.choice(self._pool)
        call = self._call(sped_up(known.message, **self._speculation()))
        left = self._draw.randrange(6)
        for _ in call:
            left -= 1
            if left < 0:
                break
        call.cancel()
        self._load.count("cancels")

    def _hurry(self) -> None:
        known = self._draw.choice(self._pool)
        message = sped_up(known.message, **self._speculation())
        try:
            self._read(self._call(message, self._draw.choice((0.02, 0.2, 1.0))), known)
        except grpc.RpcError as error:
            if code_of(error) != "deadline_exceeded":
                raise
            self._load.count("deadlines passed")

    def _read_slowly(self) -> None:
        known = self._draw.choice(self._pool)
        call = self._call(sped_up(known.message, **self._speculation()))
        self._read(call, known, pause_s=self._draw.choice((0.01, 0.1)))

    def _never_read(self) -> None:
        """The server gives it up when the connection is full; how often, its metrics say."""
        with grpc.insecure_channel(self._address, options=NARROW) as channel:
            call = rpc.TargetServiceStub(channel).Generate(
                endless(self._draw), timeout=CALL_SECONDS, metadata=bearer(OTHER)
            )
            next(call)
            self._stopping.wait(NEVER_SECONDS)
            call.cancel()

    def _bad(self) -> None:
        try:
            for _ in self._call(wrong(self._draw), 60):
                pass
        except grpc.RpcError as error:
            if code_of(error) != "invalid_argument":
                raise
            self._load.count("bad requests refused")
            return
        raise Mismatch("a bad request was served")


def _check(known: Known, text: str, tokens: list[int], logprobs: list[float]) -> None:
    if tuple(tokens) != known.tokens or text != known.text:
        at = next(
            (
                i
                for i, pair in enumerate(zip(tokens, known.tokens, strict=False))
                if len({*pair}) > 1
            ),
            min(len(tokens), len(known.tokens)),
        )
        raise Mismatch(f"token {at} of {known.message}: {text!r}, not {known.text!r}")
    if len(logprobs) != len(known.logprobs) or any(
        abs(one - other) > LOGPROB_TOLERANCE
        for one, other in zip(logprobs, known.logprobs, strict=True)
    ):
        raise Mismatch(f"logprobs of {known.message}")
