"""Overlap: plain, synchronous and asynchronous speculation in one run, held against theorem 7.

    python -m tools.bench_overlap [--repeats 5] [--tokens 96]

Target on one core, draft on the other. The draft is grown until its steps outweigh what calling
them costs, the target until K draft steps cost about half of one verify. Times of each side are
measured alone, before the services start; hit rate and tokens per round on other prompts than the
timed ones; each mode runs at its own best K.
"""

import argparse
import bisect
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ssd.v1 import target_pb2 as pb
from ssd_client.bench.measure.theory import theorem7
from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import parse_shape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Launch, Open, Outcome, Source, TargetFrame
from ssd_engine.speculation.verification import Verification
from ssd_engine.text.token_ids import pack_tokens
from tools.bench_kit import (
    Client,
    Generated,
    bootstrap,
    pin_to,
    service,
    setting,
    story_prompts,
)

DRAFT_SHAPE = "hidden=1280,ff=5120"
CONTEXT = 160  # tokens before a round, about the middle of a timed generation
BLOCK = 16
TIMES = 25


@dataclass(frozen=True)
class DraftTimes:
    """Milliseconds of the draft alone."""

    step: float  # one token of one chain
    tree: float  # from a launch to the last depth of its branches
    backup: float  # from an outcome to K tokens that continue it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--depth", type=int, default=3, help="K at which the target is grown")
    parser.add_argument("--budget", type=int, default=6, help="branches of a round")
    parser.add_argument("--shape", help="do not calibrate: the target's shape")
    parser.add_argument("--draft-shape", default=DRAFT_SHAPE)
    parser.add_argument("--alone", choices=("target", "draft"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(time_target(args) if args.alone == "target" else time_draft(args)))
        return
    print(setting())
    shape = args.shape or calibrate(args)
    with contextlib.ExitStack() as stack:
        client = start(stack, args, shape)
        run(client, args, shape)


# Each side alone


def alone(
    side: str, args: argparse.Namespace, core: int, depth: int, shape: str | None = None
) -> dict[str, float]:
    """In a process of its own, pinned to the core that the service has."""
    command = [sys.executable, "-m", "tools.bench_overlap", "--alone", side]
    command += ["--depth", str(depth), "--budget", str(args.budget)]
    command += ["--draft-shape", args.draft_shape]
    command += ["--shape", shape] if shape else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pin_to(core, process.pid)
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    times: dict[str, float] = json.loads(said)
    return times


def make_runner(model: str, shape: str | None) -> ModelRunner:
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    directory = resolve_model(model)
    options = RunnerOptions(
        directory=directory,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=2048,
        max_num_seqs=8,
        max_forward_tokens=2048,
        num_kv_blocks=256,
        expand_to=None if shape is None else parse_shape(shape),
    )
    return ModelRunner(load_model_config(directory), options, SingleRank())


def clock(work: Callable[[], object]) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(TIMES + 3):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def time_target(args: argparse.Namespace) -> dict[str, float]:
    runner = make_runner("stories-target", args.shape)
    blocks, prompt = list(range(32)), list(range(300, 300 + CONTEXT))
    runner.forward([Chunk(prompt, 0, blocks, 1)])
    rows = [500 + i for i in range(args.depth + 1)]

    def verify() -> None:
        logits = runner.forward([Chunk(rows, CONTEXT, blocks, len(rows))])
        if logits is not None:
            logits.argmax(dim=-1).tolist()

    return {"verify": clock(verify)}


class DraftAlone:
    """A draft's engine that is told rounds of some sequences, without a target."""

    def __init__(
        self,
        runner: ModelRunner,
        depth: int,
        budget: int,
        sequences: int = 1,
        sampling: SamplingParams | None = None,
    ) -> None:
        speculator = ModelSpeculator(runner, BLOCK, 2048, depth, budget)
        rows = max(256, 2 * sequences * (budget + depth + 1))
        self.core = DraftCore(
            speculator, lambda _: Planner(depth, budget), max(8, sequences), None, rows, 512
        )
        self.depth, self.round = depth, 0
        self.core.handle(TargetLinkUp(1, depth))
        sampling = sampling or SamplingParams(seed=0, temperature=0.0)
        self.keys = range(1, sequences + 1)
        prompts = [
            pack_tokens([300 + (7 * key + i) % 3000 for i in range(CONTEXT)]) for key in self.keys
        ]
        coupled = Verification.COUPLED
        self.tell(
            *(
                Open(key, 0, prompt, b"", [], 2000, sampling, coupled, 1.0, depth, 0)
                for key, prompt in zip(self.keys, prompts, strict=True)
            )
        )
        self.rest()

    def sequence(self, key: int) -> DraftSequence:
        return self.core._links[1].sequences[key]

    def tell(self, *frames: TargetFrame) -> float:
        """Milliseconds until everything is there that the target can use."""
        begin = time.perf_counter()
        self.core.handle(TargetFrames(1, list(frames)))
        self.core.step()
        inbox = self.core._links[1].inbox  # of many frames some are looked at in later steps
        while inbox or not all(self.sequence(key).ready for key in self.keys):
            self.core.step()
        return 1e3 * (time.perf_counter() - begin)

    def rest(self) -> None:
        """Let it finish whatever it does beyond that."""
        while self.core.has_work:
            self.core.step()

    def hit(self) -> list[TargetFrame]:
        """The longest of its branches is taken, in every sequence."""
        frames: list[TargetFrame] = []
        for key in self.keys:
            branches = self.sequence(key).branches.values()
            branch = max(branches, key=lambda branch: branch.accepted)
            frames.append(Outcome(key, self.round, branch.accepted, branch.token))
            frames.append(self._launch(key, branch.tokens[: self.depth]))
        self.round += 1
        return frames

    def miss(self) -> list[TargetFrame]:
        """Outcomes that it has not prepared for."""
        frames: list[TargetFrame] = []
        for key in self.keys:
            prepared = {branch.token for branch in self.sequence(key).branches.values()}
            token = next(t for t in range(300, 4000) if t not in prepared)
            frames.append(Outcome(key, self.round, 0, token))
        return frames

    def go_on(self) -> list[TargetFrame]:
        """The rounds after these, with what was drafted just in time."""
        frames: list[TargetFrame] = []
        for key in self.keys:
            (decided,) = self.sequence(key).branches.values()
            frames.append(self._launch(key, decided.tokens[: self.depth]))
        self.round += 1
        return frames

    def _launch(self, key: int, tokens: list[int]) -> Launch:
        return Launch(key, self.round + 1, tokens, Source.CACHE, self.depth, 0)


def time_draft(args: argparse.Namespace) -> dict[str, float]:
    tree, backup = time_rounds(
        DraftAlone(make_runner("stories-draft", args.draft_shape), args.depth, args.budget)
    )
    runner = make_runner("stories-draft", args.draft_shape)
    blocks = list(range(32))
    runner.forward([Chunk(list(range(300, 300 + CONTEXT)), 0, blocks, 1)])

    def step() -> None:
        logits = runner.forward([Chunk([500], CONTEXT, blocks, 1)])
        if logits is not None:
            logits.argmax(dim=-1).tolist()

    return {"step": clock(step), "tree": tree, "backup": backup}


def time_rounds(draft: DraftAlone) -> tuple[float, float]:
    """Milliseconds of a tree after a hit, and of a path after a miss."""
    trees, backups = [], []
    for _ in range(TIMES):
        trees.append(draft.tell(*draft.hit()))
        draft.rest()
        backups.append(draft.tell(*draft.miss()))
        draft.tell(*draft.go_on())
        draft.rest()
    return statistics.median(trees[3:]), statistics.median(backups[3:])


def calibrate(args: argparse.Namespace) -> str:
    """The shape whose verify is closest to twice K draft steps."""
    wanted = 2 * args.depth * alone("draft", args, 1, args.depth)["step"]
    shapes = [f"hidden={width},ff={4 * width},layers=8" for width in range(256, 2049, 64)]
    verify: dict[str, float] = {}

    def seconds(shape: str) -> float:
        verify[shape] = alone("target", args, 0, args.depth, shape)["verify"]
        return verify[shape]

    bisect.bisect_left(shapes, wanted, key=seconds)
    return min(verify, key=lambda shape: abs(verify[shape] - wanted))


# The services


def start(stack: contextlib.ExitStack, args: argparse.Namespace, shape: str) -> Client:
    depth = str(max(DEPTHS))
    draft = service(
        "ssd_draft", "stories-draft", "--threads", "1", "--depth", depth, "--budget",
        str(args.budget), "--expand-to", args.draft_shape, core=1,
    )  # fmt: skip
    address = stack.enter_context(draft)
    target = service(
        "ssd_target", "stories-target", "--threads", "1", "--depth", depth, "--expand-to", shape,
        "--draft", address, "--draft-model", "stories-draft", "--draft-expand-to",
        args.draft_shape, "--no-adapt-depth", "--no-auto-off", "--backup", "jit", core=0,
    )  # fmt: skip
    client = Client(stack.enter_context(target))
    client.wait_for_links(1)
    return client


DEPTHS = (2, 3, 4, 5)


def run(client: Client, args: argparse.Namespace, shape: str) -> None:
    other = story_prompts(12, seed=11)
    for mode in ("ssd", "sync", "off"):
        client.generate(other[0], mode, 32)  # warm
    best = {mode: best_depth(client, mode, other[:3], args) for mode in ("sync", "ssd")}
    best["off"] = 0
    draft = DraftTimes(**alone("draft", args, 1, best["ssd"]))
    verify = alone("target", args, 0, best["ssd"], shape)["verify"]
    describe(args, shape, best, draft, verify)
    learnt = [client.generate(p, "ssd", args.tokens, best["ssd"]) for p in other]
    timed = [p for p in story_prompts(40, seed=12) if p not in other][: args.prompts]
    rates: dict[str, list[float]] = defaultdict(list)
    details: dict[str, list[Generated]] = defaultdict(list)
    for _ in range(args.repeats):
        for mode in ("off", "sync", "ssd"):
            done = [client.generate(p, mode, args.tokens, best[mode]) for p in timed]
            rates[mode].append(statistics.mean(g.rate for g in done))
            details[mode] += done
    check_texts(details)
    report(rates, details, best)
    compare(learnt, rates["ssd"], draft, verify)


def describe(
    args: argparse.Namespace, shape: str, best: dict[str, int], draft: DraftTimes, verify: float
) -> None:
    k = best["ssd"]
    print(f"\ntarget: stories-target grown to {shape}")
    print(f"draft: stories-draft grown to {args.draft_shape}; greedy, {args.tokens} tokens")
    print(f"alone, at K = {k}: verify {verify:.1f} ms, tree {draft.tree:.1f} ms, ", end="")
    print(f"backup {draft.backup:.1f} ms, draft step {draft.step:.2f} ms")
    steps = best["sync"] * draft.step
    print(f"the {best['sync']} draft steps of sync are {steps / verify:.2f} of a verify")


def best_depth(client: Client, mode: str, prompts: Sequence[str], args: argparse.Namespace) -> int:
    rates = {
        depth: statistics.mean(client.generate(p, mode, args.tokens, depth).rate for p in prompts)
        for depth in DEPTHS
    }
    shown = ", ".join(f"{depth}: {rate:.1f}" for depth, rate in rates.items())
    print(f"{mode}: tokens/s by K: {shown}")
    return max(rates, key=lambda depth: rates[depth])


def check_texts(details: dict[str, list[Generated]]) -> None:
    plain = [g.tokens for g in details["off"]]
    for mode in ("sync", "ssd"):
        if [g.tokens for g in details[mode]] != plain:
            raise SystemExit(f"{mode} changed the text")


def report(
    rates: dict[str, list[float]], details: dict[str, list[Generated]], best: dict[str, int]
) -> None:
    print("\nmode  K   tokens/s  95 % interval     tokens/round  from cache  hit rate")
    for mode, values in rates.items():
        low, high = bootstrap(values)
        stats = [g.stats for g in details[mode]]
        rounds = sum(s.rounds for s in stats)
        per_round = sum(s.accepted_tokens for s in stats) / max(1, rounds) + 1
        cached = sum(s.cache_tokens for s in stats) / sum(len(g.tokens) for g in details[mode])
        hits = sum(s.cache_rounds for s in stats) / max(1, rounds)
        print(
            f"{mode:4s}  {best[mode]:2d}  {statistics.median(values):7.1f}   "
            f"{low:6.1f} to {high:5.1f}     {per_round:5.2f}        {cached:5.0%}      {hits:5.0%}"
        )
    for one, over in (("ssd", "sync"), ("ssd", "off"), ("sync", "off")):
        ratios = [a / b for a, b in zip(rates[one], rates[over], strict=True)]
        low, high = bootstrap(ratios)
        print(f"{one} / {over}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


def compare(
    learnt: Sequence[Generated], measured: list[float], draft: DraftTimes, verify: float
) -> None:
    stats = [g.stats for g in learnt]
    p, e_hit, e_miss = rates_of(stats)
    predicted = theorem7(p, e_hit, e_miss, verify / 1e3, draft.tree / verify, draft.backup / verify)
    found = statistics.median(measured)
    t_p, t_b = draft.tree / verify, draft.backup / verify
    print(f"\ntheorem 7 with p = {p:.2f}, E_hit = {e_hit:.2f}, E_miss = {e_miss:.2f} elsewhere,")
    print(f"T_v = {verify:.1f} ms, T_p = {t_p:.2f}, T_b = {t_b:.2f}: ", end="")
    print(
        f"{predicted:.1f} tokens/s predicted, {found:.1f} measured ({found / predicted - 1:+.1%})"
    )


def rates_of(stats: Sequence[pb.SpeculationStats]) -> tuple[float, float, float]:
    """Hit rate, tokens of a round that hit, and of one that missed."""
    rounds, hits = sum(s.rounds for s in stats), sum(s.cache_rounds for s in stats)
    right, cached = sum(s.accepted_tokens for s in stats), sum(s.cache_tokens for s in stats)
    misses = max(1, rounds - hits)
    return hits / rounds, 1 + cached / max(1, hits), 1 + (right - cached) / misses


if __name__ == "__main__":
    main()
