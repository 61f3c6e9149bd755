"""Measure a head beside a draft model, by the code that trained them, in float32 on a CPU:

python -m tools.train.evaluate_head --corpus stories.jsonl.xz --target DIR --head DIR --draft DIR

The target writes; then each of them, at every place of that text, foresees a chain of tokens. A
round speculates the first K of a chain, is right up to its first wrong token, and the target adds
its own. Noise is that of the services, so that these texts and rounds are what they serve. All on
held-out prompts.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ssd_engine.sampling.noise import gumbel_rows
from tools.train.data import read_corpus, split
from tools.train.evaluate import held_out_prompts
from tools.train.head_model import Head, load_trained_head, watched
from tools.train.model import Cache, Llama, load
from tools.train.sample import equal_lengths

log = logging.getLogger("evaluate")

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTHS = range(1, 8)
ROWS = 64  # texts that are written together


@dataclass(frozen=True)
class Text:
    tokens: list[int]
    prompt: int  # tokens of the prompt, the first ones
    seed: int
    temperature: float

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt


# From a text and the noise of its written tokens: [written, DEPTHS], of the chain that begins at
# each of them, which tokens are right.
Foresight = Callable[[Text, Tensor | None], Tensor]


def noise_of(seeds: Tensor, positions: Tensor, temperature: float, vocab: int) -> Tensor | None:
    """[n, vocabulary] for seeds [n] and positions [n]; None where there is none."""
    return None if temperature == 0 else temperature * gumbel_rows(seeds, positions, vocab)


def draw(logits: Tensor, noise: Tensor | None) -> Tensor:
    """[n], as the services draw from logits [n, vocabulary]."""
    return (logits if noise is None else logits + noise).argmax(-1)


@torch.no_grad()
def write_texts(
    target: Llama, prompts: Sequence[np.ndarray], temperature: float, limit: int
) -> Iterator[Text]:
    """A text for each prompt, to <|eos|> or ``limit`` tokens; seeds count the texts."""
    count = 0
    for batch in equal_lengths(list(prompts), ROWS):
        prompt = torch.from_numpy(batch.astype(np.int64))
        seeds = torch.arange(count, count + len(prompt))
        count += len(prompt)
        rows = _continue(target, prompt, seeds, temperature, limit)
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            length = _end(row, prompt.shape[1], target.config.eos_token_id)
            yield Text(row[:length], prompt.shape[1], seed, temperature)


def _continue(
    target: Llama, prompt: Tensor, seeds: Tensor, temperature: float, limit: int
) -> Tensor:
    room = prompt.shape[1] + limit
    cache = Cache(target.config, len(prompt), room, prompt)
    tokens, new = prompt, prompt
    ended = torch.zeros(len(prompt), dtype=torch.bool)
    while tokens.shape[1] < room and not ended.all():
        logits = target.logits(target.model(new, cache)[:, -1])
        positions = torch.full_like(seeds, tokens.shape[1])
        new = draw(logits, noise_of(seeds, positions, temperature, logits.shape[1]))[:, None]
        tokens = torch.cat((tokens, new), dim=1)
        ended |= new[:, 0] == target.config.eos_token_id
    return tokens


def _end(row: list[int], prompt: int, eos: int) -> int:
    return row.index(eos, prompt) + 1 if eos in row[prompt:] else len(row)


def foresight_of_head(head: Head, target: Llama) -> Foresight:
    """A chain begins with what the target has told of all tokens but the last one before it."""

    @torch.no_grad()
    def foresee(text: Text, noise: Tensor | None) -> Tensor:
        rows = torch.tensor([text.tokens])
        features, _ = watched(target, rows, head.boundaries)
        embedded = target.model.embed_tokens(rows[:, 1:])
        right = torch.zeros(text.written, len(DEPTHS), dtype=torch.bool)
        for k, logits in enumerate(head(embedded, features[:, :-1], len(DEPTHS))):
            # Row j tells token j + 2 + k; the chain's first token is j + 2.
            first = text.prompt - 2
            told = logits[0, first : len(text.tokens) - 2 - k]
            right[: len(told), k] = _is_right(told, text, noise, k)
        return right

    return foresee


def foresight_of_model(draft: Llama) -> Foresight:
    """All tokens of a chain before the first wrong one are the text's own."""

    @torch.no_grad()
    def foresee(text: Text, noise: Tensor | None) -> Tensor:
        logits = draft(torch.tensor([text.tokens]))[0, text.prompt - 1 : -1]
        alone = _is_right(logits, text, noise, 0)
        right = torch.zeros(text.written, len(DEPTHS), dtype=torch.bool)
        for k in range(min(len(DEPTHS), text.written)):
            right[: text.written - k, k] = alone[k:]
        return right

    return foresee


def _is_right(logits: Tensor, text: Text, noise: Tensor | None, begin: int) -> Tensor:
    """[n]: whether logits [n, vocabulary] give the written tokens from ``begin`` on."""
    some = slice(begin, begin + len(logits))
    said = draw(logits, None if noise is None else noise[some])
    return said == torch.tensor(text.tokens[text.prompt :])[some]


def rounds_of(right: Tensor, depth: int) -> int:
    """Rounds after the one of the prompt, whose token is the first that is written."""
    lengths = right[:, :depth].long().cumprod(1).sum(1).tolist()
    rounds, place = 0, 1
    while place < len(lengths):
        place += lengths[place] + 1
        rounds += 1
    return rounds


def acceptance_lengths(
    ways: Mapping[str, Foresight], texts: Sequence[Text], vocab: int
) -> dict[str, list[float]]:
    """Tokens of a round, the target's own included, for speculations of each depth."""
    rounds = {name: [0 for _ in DEPTHS] for name in ways}
    for text in texts:
        positions = torch.arange(text.prompt, len(text.tokens))
        seeds = torch.full_like(positions, text.seed)
        noise = noise_of(seeds, positions, text.temperature, vocab)
        for name, foresee in ways.items():
            right = foresee(text, noise)
            counts = zip(rounds[name], DEPTHS, strict=True)
            rounds[name] = [count + rounds_of(right, depth) for count, depth in counts]
    tokens = sum(text.written - 1 for text in texts)
    return {name: [tokens / count for count in counts] for name, counts in rounds.items()}


def report(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    target = load(arguments.target).eval()
    ways = {
        "head": foresight_of_head(load_trained_head(arguments.head, target.config), target),
        "draft": foresight_of_model(load(arguments.draft).eval()),
    }
    _, held_out = split(read_corpus(arguments.corpus))
    prompts = held_out_prompts(held_out, tokenizer, arguments.prompts)
    found: dict[str, dict[str, list[float]]] = {}
    for temperature in TEMPERATURES:
        texts = list(write_texts(target, prompts, temperature, arguments.tokens))
        log.info("T = %g: %d texts, %d tokens", temperature, len(texts), _written(texts))
        lengths = acceptance_lengths(ways, texts, target.config.vocab_size)
        for name, each in lengths.items():
            log.info("%5s  %s", name, " ".join(f"{length:.3f}" for length in each))
        found[str(temperature)] = lengths
    return found


def _written(texts: Sequence[Text]) -> int:
    return sum(text.written for text in texts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a head beside a draft model.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--target", type=Path, required=True, help="from train.py")
    parser.add_argument("--head", type=Path, required=True, help="from head.py")
    parser.add_argument("--draft", type=Path, required=True, help="from distill.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of a text, at most")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    found = report(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
