"""stories-eagle, which reads its target's hidden states, beside stories-draft, which does not.

    python -m tools.bench_eagle [--prompts 6] [--tokens 96] [--depths 3] [--temperatures 0 0.7 1]

Real services, float32 on a CPU, target and draft on different cores: inside the target (sync), and
as an endpoint (ssd). Tokens of a round with the target's own one. Beside them, for sync, what an
offline evaluation by the training code says of the same texts; for ssd, what it is when target and
draft take turns in one process, so that the draft always has the time it needs. In ssd a head has
not been told the features of the round before when it drafts, so it goes on from its own states for
longer, and fewer of its tokens are right. Where a branch misses, it drafts with all that was told.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from tests.harness import Request, Result, make_runner, run
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
        steps = asked.depth + 6
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
        client.generate(prompt, mode, asked.tokens, asked.depth, asked.temperature, seed)
        for seed, prompt in enumerate(asked.prompts)
    ]


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
        tokens = sum(len(one.tokens) - 1 for one in done[mode])
        length = tokens / sum(each.rounds for each in stats)
        looked = sum(s.hits + s.late + s.length_misses + s.token_misses for s in stats)
        found = f"{sum(s.hits for s in stats) / looked:9.1%} {hits:9.1%}" if looked else " " * 19
        rate = statistics.median(one.rate for one in done[mode])
        print(
            f"{asked.temperature:4g} {asked.depth:2}  {draft:13} {mode:4} {length:12.3f} "
            f"{other:7.3f} {length / other - 1:+6.1%} {found} {rate:8.1f} {rate / plain:6.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, nargs="+", choices=DEPTHS, default=[3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:])
    args = parser.parse_args()
    print(setting())
    print(f"{TARGET}, float32; {args.prompts} prompts, {args.tokens} tokens each\n")
    print(
        "   T  K  draft         mode tokens/round  beside           hits    beside tokens/s of off"
    )
    offline, in_turns, prompts = Offline(), InTurns(), story_prompts(args.prompts, seed=0)
    same = True
    for draft in (HEAD, DRAFT):
        with pair(draft, args.modes) as client:
            for temperature in args.temperatures:
                for depth in args.depths:
                    asked = Asked(prompts, args.tokens, depth, temperature)
                    done = {mode: measure(client, mode, asked) for mode in ("off", *args.modes)}
                    beside = {}
                    if "sync" in args.modes:
                        beside["sync"] = offline.length(draft, asked, done["off"]), 0.0
                    if "ssd" in args.modes:
                        beside["ssd"] = in_turns.measure(draft, asked)
                    show(draft, asked, done, beside)
                    texts = [[one.tokens for one in each] for each in done.values()]
                    same &= all(each == texts[0] for each in texts)
    if not same:
        raise SystemExit("FAILED: a text is not plain decoding's")


if __name__ == "__main__":
    main()
