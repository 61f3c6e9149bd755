"""stories-eagle, which reads its target's hidden states, beside stories-draft, which does not.

    python -m tools.bench_eagle [--prompts 6] [--tokens 96] [--depths 3] [--temperatures 0 0.7 1]

Real services, float32 on a CPU, target and draft on different cores: inside the target (sync), and
as an endpoint (ssd). Tokens of a round with the target's own one. Beside them, for sync, what an
offline evaluation by the training code says of the same texts; for ssd, what it is when target and
draft take turns in one process, so that the draft always has the time it needs. In ssd a head has
not been told the features of the round before when it drafts, so it goes on from its own states for
longer, and fewer of its tokens are right. Where a branch misses, it drafts with all that was told.

No prompt is found in a prefix cache: a head is told of all of it, as offline. Exit code 1 where a
text is not plain decoding's, or where sync is further than 3 % from the offline evaluation.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from tests.harness import BLOCK, Request, Result, make_runner, run
from tests.simulation import Simulation
from tools.bench_kit import Client, Generated, service, setting, story_prompts
from tools.train.evaluate_head import (
    DEPTHS,
    Foresight,
    Text,
    acceptance_lengths,
    foresight_of_head,
    foresight_of_model,
)
from tools.train.head_model import load_trained_head
from tools.train.model import load

TARGET, HEAD, DRAFT = "stories-target", "stories-eagle", "stories-draft"
TARGET_FLAGS = ("--threads", "1", "--no-adapt-depth", "--no-auto-off", "--dtype", "float32")
DRAFT_FLAGS = ("--threads", "1", "--dtype", "float32")
MODES = ("off", "sync", "ssd")
FARTHEST = 0.03  # that sync may be from the offline evaluation of its texts
ENOUGH_ROUNDS = 60  # for that
CONTEXT, STEPS = 128, 60  # tokens before a drafted one that is timed, and how often it is
HEADER = "   T  K  draft         mode tokens/round  beside           hits    beside tokens/s of off"
_salts = map(str, itertools.count())  # each request has its own: nothing is cached


@dataclass(frozen=True)
class Asked:
    prompts: Sequence[str]
    tokens: int
    depth: int
    temperature: float


class Offline:
    """The training code on texts that were served."""

    def __init__(self) -> None:
        directory = resolve_model(TARGET)
        target = load(directory).eval()
        head = load_trained_head(resolve_model(HEAD), target.config)
        self._ways: dict[str, Foresight] = {
            HEAD: foresight_of_head(head, target),
            DRAFT: foresight_of_model(load(resolve_model(DRAFT)).eval()),
        }
        self._vocab = target.config.vocab_size
        self._tokenizer = Tokenizer(directory, load_model_config(directory))

    def length(self, draft: str, asked: Asked, done: Sequence[Generated]) -> float:
        """Tokens of a round."""
        texts = []
        for seed, (prompt, one) in enumerate(zip(asked.prompts, done, strict=True)):
            chat = self._tokenizer.encode_chat([{"role": "user", "content": prompt}])
            texts.append(Text(chat + one.tokens, len(chat), seed, asked.temperature))
        lengths = acceptance_lengths({draft: self._ways[draft]}, texts, self._vocab)[draft]
        return lengths[DEPTHS.index(asked.depth)]


class InTurns:
    """Target and draft in one process: the draft is never late, and is waited for after a miss."""

    def __init__(self) -> None:
        directory = resolve_model(TARGET)
        config = load_model_config(directory)
        self._target, draft = make_runner(directory, 512), make_runner(resolve_model(DRAFT), 512)
        self._tokenizer = Tokenizer(directory, config)
        head = fit_to_target(load_head_config(resolve_model(HEAD)), config, TARGET)
        checkpoint = open_head(resolve_model(HEAD), head, directory)
        heads = HeadRunner(head, checkpoint, draft.options, config.vocab_size)
        self._drafts: dict[str, ModelRunner] = {HEAD: heads, DRAFT: draft}
        self._feature_width = head.feature_width

    def token_ms(self, draft: str) -> float:
        """The time of a drafted token, after CONTEXT others."""
        runner, blocks = self._drafts[draft], list(range(CONTEXT // BLOCK + 1))
        text = Chunk(list(range(CONTEXT)), 0, blocks, 1)
        if isinstance(runner, HeadRunner):
            told = GivenFeatures([CONTEXT], torch.zeros(CONTEXT, self._feature_width))
            runner.step_with_features([text], [None], told).result()
        else:
            runner.forward([text])
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            runner.forward([Chunk([7], CONTEXT, blocks, 1)])
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times[STEPS // 5 :])

    def measure(self, draft: str, asked: Asked) -> tuple[float, float]:
        """Tokens of a round, and the share of look-ups that found their branch."""
        done = [self._one(draft, asked, seed) for seed in range(len(asked.prompts))]
        stats = [each.speculation for each in done if each.speculation is not None]
        looked = sum(s.hits + s.late + s.length_misses + s.token_misses for s in stats)
        tokens = sum(len(each.tokens) - 1 for each in done)
        return tokens / sum(s.rounds for s in stats), sum(s.hits for s in stats) / looked

    def _one(self, draft: str, asked: Asked, seed: int) -> Result:
        prompt = [{"role": "user", "content": asked.prompts[seed]}]
        request = Request(
            self._tokenizer.encode_chat(prompt),
            SamplingParams(seed, asked.temperature),
            asked.tokens,
            speculation=SpeculationRequest(Mode.SSD, depth=asked.depth),
        )
        options = SpeculationOptions(
            depth=asked.depth,
            adapt_depth=False,
            backup=Backup.JUST_IN_TIME,
            wait_seconds=1.0,
            auto_off=False,
        )
        steps = 2 * asked.depth + 6  # a head drafts its chain anew, too
        simulation = Simulation(
            self._target, self._drafts[draft], options, draft_steps=(steps,) * 2
        )
        return run(simulation.core, [request])[0]


@contextlib.contextmanager
def pair(draft: str, modes: Sequence[str]) -> Iterator[Client]:
    """A target with this draft inside, and for ssd with an endpoint that serves it."""
    depth = ("--depth", str(DEPTHS[-1]))
    flags = [*TARGET_FLAGS, *depth, "--draft-model", draft]
    with contextlib.ExitStack() as stack:
        if "ssd" in modes:
            endpoint = service("ssd_draft", draft, *DRAFT_FLAGS, *depth, core=1)
            flags += ["--draft", stack.enter_context(endpoint)]
        client = Client(stack.enter_context(service("ssd_target", TARGET, *flags, core=0)))
        client.wait_for_links(int("ssd" in modes))
        for mode in modes:
            client.generate(story_prompts(1, seed=9)[0], mode, 16)  # to warm up
        yield client


def measure(client: Client, mode: str, asked: Asked) -> list[Generated]:
    return [
        client.generate(
            prompt,
            mode,
            asked.tokens,
            asked.depth,
            asked.temperature,
            seed,
            cache_salt=next(_salts),
        )
        for seed, prompt in enumerate(asked.prompts)
    ]


def tokens_of_a_round(done: Sequence[Generated]) -> tuple[float, int]:
    """And how many rounds there were."""
    rounds = sum(one.stats.rounds for one in done)
    return sum(len(one.tokens) - 1 for one in done) / rounds, rounds


def problems(
    draft: str, asked: Asked, done: dict[str, list[Generated]], offline: float | None
) -> Iterator[str]:
    """What must not be. ``offline``: tokens of a round, by the training code."""
    about = f"{draft}, T = {asked.temperature:g}, K = {asked.depth}"
    plain = [one.tokens for one in done["off"]]
    for mode, each in done.items():
        if [one.tokens for one in each] != plain:
            yield f"{about}: a text of {mode} is not plain decoding's"
        if any(one.cached for one in each):
            yield f"{about}: a prompt of {mode} was found in the prefix cache"
    if offline is None:
        return
    served, rounds = tokens_of_a_round(done["sync"])
    if rounds >= ENOUGH_ROUNDS and abs(served / offline - 1) > FARTHEST:
        yield f"{about}: sync has {served:.3f} tokens a round, offline it is {offline:.3f}"


def show(
    draft: str,
    asked: Asked,
    done: dict[str, list[Generated]],
    beside: dict[str, tuple[float, float]],
) -> None:
    """``beside``: tokens of a round and hits, by mode."""
    plain = statistics.median(one.rate for one in done["off"])
    for mode, (other, hits) in beside.items():
        stats = [one.stats for one in done[mode]]
        length, _ = tokens_of_a_round(done[mode])
        looked = sum(s.hits + s.late + s.length_misses + s.token_misses for s in stats)
        found = f"{sum(s.hits for s in stats) / looked:9.1%} {hits:9.1%}" if looked else " " * 19
        rate = statistics.median(one.rate for one in done[mode])
        print(
            f"{asked.temperature:4g} {asked.depth:2}  {draft:13} {mode:4} {length:12.3f} "
            f"{other:7.3f} {length / other - 1:+6.1%} {found} {rate:8.1f} {rate / plain:6.2f}",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, nargs="+", choices=DEPTHS, default=[3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:])
    return parser.parse_args()


def compare(
    draft: str, asked: Asked, client: Client, modes: Sequence[str], offline: Offline, turns: InTurns
) -> list[str]:
    """Prints a line for each mode; returns what must not be."""
    done = {mode: measure(client, mode, asked) for mode in ("off", *modes)}
    beside: dict[str, tuple[float, float]] = {}
    if "sync" in modes:
        beside["sync"] = offline.length(draft, asked, done["off"]), 0.0
    if "ssd" in modes:
        beside["ssd"] = turns.measure(draft, asked)
    show(draft, asked, done, beside)
    expected = beside["sync"][0] if "sync" in beside else None
    return list(problems(draft, asked, done, expected))


def main() -> None:
    args = parse()
    print(setting())
    print(f"{TARGET}, float32; {args.prompts} prompts, {args.tokens} tokens each")
    offline, turns, prompts = Offline(), InTurns(), story_prompts(args.prompts, seed=0)
    for draft in (HEAD, DRAFT):
        print(f"a drafted token of {draft}: {turns.token_ms(draft):.2f} ms on one thread")
    print(f"\n{HEADER}")
    failed: list[str] = []
    for draft in (HEAD, DRAFT):
        with pair(draft, args.modes) as client:
            for temperature, depth in itertools.product(args.temperatures, args.depths):
                asked = Asked(prompts, args.tokens, depth, temperature)
                failed += compare(draft, asked, client, args.modes, offline, turns)
    if failed:
        raise SystemExit("\n".join(f"FAILED: {each}" for each in failed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):  # as in the services
        main()
