"""Sharing a draft: the hit rate of an honest target beside a polite neighbour and a flooding one.

    python -m tools.bench_fairness [--streams 1] [--tokens 120] [--repeats 5] [--shape SHAPE]

The neighbour is a link by hand. A polite one holds as many sequences as the honest target and plays
their rounds at the pace of a forward; a flooding one holds all that it can get, plays rounds
without a pause, always asks for the most, opens long prompts anew and shouts in between. The draft
has a core of its own, the honest target shares the other one with its neighbour; neighbours are
interleaved.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import queue
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import speculation_pb2_grpc as rpc
from ssd.v1 import target_pb2
from tools.bench_kit import (
    Client,
    Generated,
    bootstrap,
    pin_to,
    service,
    setting,
    story_prompts,
)

NEIGHBOURS = ("none", "polite", "flooding")
SHAPE = "hidden=1280,ff=5120,layers=8"
FORWARD_SECONDS = 0.1  # of a polite neighbour
PROMPT_TOKENS = {"polite": 30, "flooding": 500}
SPECULATION = 5
MAX_ROUNDS = 100  # of a sequence, then it is opened anew
JUNK = 200  # frames about nothing, of a flood


class Neighbour:
    """A target that verifies nothing: its outcomes are what the draft guessed."""

    def __init__(self, address: str, style: str, sequences: int) -> None:
        stub = rpc.SpeculationServiceStub(grpc.insecure_channel(address))
        self._info = stub.GetDraftInfo(pb.GetDraftInfoRequest())
        self._style = style
        self._count = sequences if style == "polite" else self._info.max_sequences
        self._outbox: queue.Queue[pb.SpeculateRequest] = queue.Queue(8)
        self._call = stub.Speculate(iter(self._outbox.get, None))
        self._guesses: dict[tuple[int, int], pb.Branch] = {}  # by sequence and round
        hello = pb.Hello(
            protocol_version=1,
            oldest_protocol_version=1,
            epoch=1,
            target_name=style,
            tokenizer_fingerprint=self._info.tokenizer_fingerprint,
            vocab_size=self._info.vocab_size,
            max_depth=8,
        )
        self._outbox.put(pb.SpeculateRequest(hello=hello))
        next(self._call)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                for frame in response.frames.frames:
                    for branch in frame.branches.branches[:1]:
                        self._guesses[frame.sequence, frame.round] = branch

    def play(self, stop: Event) -> None:
        for step in itertools.count():
            if stop.is_set():
                self._call.cancel()
                return
            frames = [f for name in range(self._count) for f in self._round(name, step)]
            if self._style == "flooding":
                frames += [pb.TargetFrame(sequence=10**9, close=pb.Close())] * JUNK
            for begin in range(0, len(frames), 1000):
                part = pb.TargetFrames(epoch=1, frames=frames[begin : begin + 1000])
                self._outbox.put(pb.SpeculateRequest(frames=part))
            if self._style == "polite":
                time.sleep(FORWARD_SECONDS)

    def _round(self, name: int, step: int) -> Iterator[pb.TargetFrame]:
        number = (step + 7 * name) % MAX_ROUNDS
        if step == 0 or number == 0:
            yield pb.TargetFrame(sequence=name, round=number, open=self._open(step))
            return
        guess = self._guesses.pop((name, number - 1), pb.Branch(token=2))
        outcome = pb.Outcome(accepted=0, token=guess.token)
        yield pb.TargetFrame(sequence=name, round=number - 1, outcome=outcome)
        launch = pb.Launch(
            speculation=guess.tokens[:SPECULATION],
            source=pb.SPECULATION_SOURCE_CACHE if guess.tokens else pb.SPECULATION_SOURCE_NONE,
            depth=8,
            verify_micros=int(1e6 * FORWARD_SECONDS) if self._style == "polite" else 0,
        )
        yield pb.TargetFrame(sequence=name, round=number, launch=launch)

    def _open(self, step: int) -> pb.Open:
        length = PROMPT_TOKENS[self._style]
        prompt = [5 + (step + i) % 1000 for i in range(length)]
        return pb.Open(
            prompt=b"".join(token.to_bytes(4, "little") for token in prompt),
            max_tokens=length + 10 * MAX_ROUNDS,
            sampling=target_pb2.SamplingOptions(seed=step, temperature=0.0),
            verification=target_pb2.VERIFICATION_MODE_COUPLED,
            depth=8,
        )


def run_neighbour(address: str, style: str, sequences: int, stop: Event) -> None:
    pin_to(0)
    Neighbour(address, style, sequences).play(stop)


@contextlib.contextmanager
def neighbour(address: str, style: str, sequences: int) -> Iterator[None]:
    if style == "none":
        yield
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=run_neighbour, args=(address, style, sequences, stop))
    process.start()
    wait_for_links(address, 2)
    try:
        yield
    finally:
        stop.set()
        process.join(20)
        process.kill()
        wait_for_links(address, 1)


def wait_for_links(draft: str, count: int) -> None:
    with grpc.insecure_channel(draft) as channel:
        stub = rpc.SpeculationServiceStub(channel)
        while stub.GetDraftInfo(pb.GetDraftInfoRequest()).links != count:
            time.sleep(0.05)


def hit_rate(done: list[Generated]) -> float:
    stats = [each.stats for each in done]
    look_ups = sum(s.hits + s.late + s.stale + s.length_misses + s.token_misses for s in stats)
    return sum(s.hits for s in stats) / max(1, look_ups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", default=SHAPE, help="that the honest target is grown to")
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    print(setting())
    print(
        f"stories-target grown to {args.shape} on stories-draft, depth {args.depth}, "
        f"{args.streams} streams of {args.tokens} tokens\n"
    )
    runs: dict[str, list[list[Generated]]] = defaultdict(list)
    with service("ssd_draft", "stories-draft", "--threads", "1", core=1) as draft:
        flags = ["--threads", "1", "--draft", draft, "--no-auto-off", "--expand-to", args.shape]
        flags += ["--depth", str(args.depth), "--no-adapt-depth"]
        with service("ssd_target", "stories-target", *flags, core=0) as target:
            client = Client(target)
            client.wait_for_links(1)
            client.together(story_prompts(args.streams, seed=1), "ssd", args.tokens)  # warm
            for repeat in range(args.repeats):
                prompts = story_prompts(args.streams, seed=50 + repeat)
                for style in NEIGHBOURS:
                    with neighbour(draft, style, args.streams):
                        time.sleep(0.5)
                        runs[style].append(client.together(prompts, "ssd", args.tokens))
    table(runs)


def table(runs: dict[str, list[list[Generated]]]) -> None:
    print("neighbour  hit rate  (lowest to highest)   late   tokens/round  tokens/s")
    for style in NEIGHBOURS:
        rates = [hit_rate(done) for done in runs[style]]
        each = [generated for done in runs[style] for generated in done]
        rounds = sum(g.stats.rounds for g in each)
        late = sum(g.stats.late for g in each) / rounds
        tokens = sum(len(g.tokens) - 1 for g in each) / rounds
        speed = statistics.median(g.rate for g in each)
        print(
            f"{style:9s}  {statistics.median(rates):8.3f}  ({min(rates):.3f} to {max(rates):.3f})"
            f"      {late:6.1%}  {tokens:9.2f}  {speed:10.1f}"
        )
    pairs = zip(runs["flooding"], runs["polite"], strict=True)
    ratios = [hit_rate(flooded) / max(1e-9, hit_rate(polite)) for flooded, polite in pairs]
    low, high = bootstrap(ratios)
    print(
        f"\nhit rate beside a flooding neighbour / beside a polite one: "
        f"{statistics.median(ratios):.2f}  (95 % interval {low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
