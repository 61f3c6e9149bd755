"""stories-eagle, which reads its target's hidden states, beside stories-draft, which does not.

    python -m tools.bench_eagle [--prompts 6] [--tokens 96] [--depths 3] [--temperatures 0 0.7 1]

Real services, float32 on a CPU, target and draft on different cores: inside the target (sync), and
as an endpoint (ssd). Tokens of a round with the target's own one; for sync also what an offline
evaluation by the training code says of the same texts. In ssd a head has not been told the features
of the last round when it drafts, so it goes on from its own states for longer: fewer of its tokens
are right. Where a branch misses, it drafts again with what it has been told by then.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import Tokenizer
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


def show(draft: str, asked: Asked, done: dict[str, list[Generated]], offline: float) -> None:
    plain = statistics.median(one.rate for one in done["off"])
    for mode in list(done)[1:]:
        stats = [one.stats for one in done[mode]]
        tokens = sum(len(one.tokens) - 1 for one in done[mode])
        length = tokens / sum(each.rounds for each in stats)
        looked = sum(s.hits + s.late + s.length_misses + s.token_misses for s in stats)
        hits = f"{sum(s.hits for s in stats) / looked:8.1%}" if looked else f"{'':>8}"
        beside = f"{offline:7.3f} {length / offline - 1:+6.1%}" if mode == "sync" else " " * 14
        rate = statistics.median(one.rate for one in done[mode])
        print(
            f"{asked.temperature:4g} {asked.depth:2}  {draft:13} {mode:4} {length:12.3f} {beside} "
            f"{hits} {rate:8.1f} {rate / plain:6.2f}",
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
    print("   T  K  draft         mode tokens/round offline        hit rate tokens/s of off")
    offline, prompts = Offline(), story_prompts(args.prompts, seed=0)
    same = True
    for draft in (HEAD, DRAFT):
        with pair(draft, args.modes) as client:
            for temperature in args.temperatures:
                for depth in args.depths:
                    asked = Asked(prompts, args.tokens, depth, temperature)
                    done = {mode: measure(client, mode, asked) for mode in ("off", *args.modes)}
                    show(draft, asked, done, offline.length(draft, asked, done["off"]))
                    texts = [[one.tokens for one in each] for each in done.values()]
                    same &= all(each == texts[0] for each in texts)
    if not same:
        raise SystemExit("FAILED: a text is not plain decoding's")


if __name__ == "__main__":
    main()
