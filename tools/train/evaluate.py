"""Measure a pair with transformers alone:

python -m tools.train.evaluate --corpus stories.jsonl.xz --target DIR --draft DIR --out FILE

Writes the figures of the model cards as JSON. Everything is on held-out stories and prompts.
"""

import argparse
import json
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tools.train.data import (
    SEED,
    Documents,
    Layout,
    Story,
    canonical_request,
    encode,
    read_corpus,
    rows_of,
    split,
)
from tools.train.loop import ROW
from tools.train.sample import equal_lengths

log = logging.getLogger("evaluate")


@torch.no_grad()
def validation_loss(model: PreTrainedModel, stream: Tensor, length: int) -> Tensor:
    """Mean cross-entropy in nats at each position of packed rows of ``length`` tokens."""
    rows = rows_of(stream, length)
    total = torch.zeros(length, device=stream.device)
    for part in rows.split(8):
        logits = model(part[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.mT, part[:, 1:], reduction="none").sum(0)
    return total / len(rows)


@torch.no_grad()
def matches(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: Tensor,
    temperature: Tensor,
    generator: torch.Generator,
    limit: int,
) -> list[list[bool]]:
    """Let the target write, and compare the draft's choice at every position of that text.

    Both models choose argmax(logits + temperature * g) with the same Gumbel noise g.
    prompt [rows, p], unpadded; temperature [rows, 1], zero for greedy. For each row: was the
    draft right, up to and including <|eos|>?
    """
    caches = (DynamicCache(config=target.config), DynamicCache(config=draft.config))
    right: list[list[bool]] = [[] for _ in prompt]
    going = torch.ones(len(prompt), dtype=torch.bool)
    new = prompt
    for _ in range(limit):
        noise = torch.empty(len(prompt), target.config.vocab_size, device=prompt.device)
        noise = temperature * noise.exponential_(generator=generator).log_().neg_()
        theirs, ours = (
            (model(new, past_key_values=cache).logits[:, -1].float() + noise).argmax(-1)
            for model, cache in zip((target, draft), caches, strict=True)
        )
        for row in going.nonzero()[:, 0].tolist():
            right[row].append(bool(theirs[row] == ours[row]))
        going &= (theirs != target.config.eos_token_id).cpu()
        if not going.any():
            break
        new = theirs[:, None]
    return right


def accepted_by_round(right: list[bool], depth: int) -> list[int]:
    """Tokens accepted in each round when every round speculates ``depth`` tokens.

    A round that accepts a tokens moves on by a + 1: the target adds its own.
    """
    rounds, position = [], 0
    while position < len(right):
        window = right[position : position + depth]
        accepted = window.index(False) if False in window else len(window)
        rounds.append(accepted)
        position += accepted + 1
    return rounds


def summary(right: list[list[bool]], depth: int = 4) -> dict[str, float]:
    """How often the draft is right, and what that gives per round of ``depth`` tokens."""
    positions = sum(map(len, right))
    rounds = [count for row in right for count in accepted_by_round(row, depth)]
    return {
        "texts": len(right),
        "positions": positions,
        "agreement": sum(map(sum, right)) / positions,
        f"accepted_per_round_k{depth}": sum(rounds) / len(rounds),
        f"tokens_per_round_k{depth}": positions / len(rounds),
    }


def agreement(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: list[np.ndarray], limit: int = 400
) -> dict[str, dict[str, float]]:
    """The summary of greedy texts and of texts sampled at temperature 1, one of each a prompt."""
    generator = torch.Generator(target.device).manual_seed(SEED)
    greedy: list[list[bool]] = []
    sampled: list[list[bool]] = []
    for batch in equal_lengths(prompts, limit=256):
        prompt = torch.from_numpy(batch.astype(np.int64)).to(target.device)
        temperature = torch.arange(2.0, device=target.device).repeat_interleave(len(prompt))
        right = matches(target, draft, prompt.repeat(2, 1), temperature[:, None], generator, limit)
        greedy += right[: len(prompt)]
        sampled += right[len(prompt) :]
    return {"greedy": summary(greedy), "sampled": summary(sampled)}


def losses(model: PreTrainedModel, stream: Tensor, bytes_per_token: float) -> dict[str, float]:
    short, long = (validation_loss(model, stream, length) for length in (ROW, 2 * ROW))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nats_per_token": short.mean().item(),
        "nats_per_byte": short.mean().item() / bytes_per_token,
        "nats_per_token_512_1023": long[512:1024].mean().item(),
        "nats_per_token_1024_2047": long[1024:].mean().item(),
    }


def held_out_prompts(stories: list[Story], tokenizer: Tokenizer, count: int) -> list[np.ndarray]:
    """Canonical chat prompts, each once, in corpus order."""
    prompts = list(dict.fromkeys(story.prompt for story in stories))[:count]
    requests = encode(tokenizer, [canonical_request(prompt) for prompt in prompts])
    return [Layout(tokenizer).chat_prefix(request) for request in requests]


def report(arguments: argparse.Namespace) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    _, held_out = split(read_corpus(arguments.corpus))
    tokens = Documents(held_out, tokenizer).stream(SEED).astype(np.int64)
    bytes_per_token = len(tokenizer.decode(tokens.tolist()).encode()) / len(tokens)
    stream = torch.from_numpy(tokens).to(arguments.device)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(arguments.device).eval()
        for path in (arguments.target, arguments.draft)
    )
    prompts = held_out_prompts(held_out, tokenizer, arguments.prompts)
    return {
        "held_out_stories": len(held_out),
        "held_out_tokens": len(tokens),
        "bytes_per_token": bytes_per_token,
        "target": losses(target, stream, bytes_per_token),
        "draft": losses(draft, stream, bytes_per_token),
        **agreement(target, draft, prompts),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a pair.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--target", type=Path, required=True, help="from train.py")
    parser.add_argument("--draft", type=Path, required=True, help="from distill.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    figures = json.dumps(report(arguments), indent=2)
    arguments.out.write_text(figures + "\n", encoding="utf-8")
    log.info("%s", figures)


if __name__ == "__main__":
    main()
