"""Distil the draft from the target:

python -m tools.train.distill --corpus stories.jsonl.xz --target DIR --out DIR

The draft learns the target's distribution on the corpus and on text that the target itself
wrote, because acceptance is decided on the target's own text.
"""

import argparse
import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train import loop
from tools.train.data import SEED, Documents, Feed, read_corpus, split
from tools.train.export import export
from tools.train.model import Llama, llama_config, load
from tools.train.sample import prefixes, sample_documents

log = logging.getLogger("draft")

CONFIG = llama_config(hidden=128, layers=2, heads=4, kv_heads=2, mlp=512)


def plain_divergence(logits: Tensor, wanted: Tensor, hard: float) -> Tensor:
    """KL(wanted || logits), mixed with ``hard`` parts of cross-entropy to wanted's argmax.

    The second term spends some of the draft's small capacity on being right when the target
    decodes greedily. Both are [n, length, vocabulary]; the result is a mean.
    """
    got = F.log_softmax(logits.float(), dim=-1).flatten(0, 1)
    log_wanted = F.log_softmax(wanted.float(), dim=-1).flatten(0, 1)
    soft = (log_wanted.exp() * (log_wanted - got)).sum(-1).mean()
    return (1 - hard) * soft + hard * F.nll_loss(got, log_wanted.argmax(-1))


divergence = torch.compile(plain_divergence, dynamic=False)


def distillation_loss(draft: Llama, target: Llama, rows: Tensor, hard: float) -> Tensor:
    """rows [n, length + 1]; the last token is not needed, since the target says what follows."""
    with loop.autocast(rows.device):
        with torch.no_grad():
            wanted = target(rows[:, :-1])
        logits = draft(rows[:, :-1])
    return divergence(logits, wanted, hard)


def mixed_stream(documents: Documents, written: list[np.ndarray]) -> Callable[[int], np.ndarray]:
    """Corpus and target-written documents, as a function from the epoch to its stream."""

    def stream(epoch: int) -> np.ndarray:
        mixed = documents.laid_out(epoch) + written
        random.Random(epoch).shuffle(mixed)
        return np.concatenate(mixed)

    return stream


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil the draft.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--target", type=Path, required=True, help="from train.py")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--hard", type=float, default=0.1, help="share of the argmax term")
    parser.add_argument("--written", type=int, help="stories the target writes, 0 for none")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(SEED)
    device = arguments.device
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    training, held_out = split(read_corpus(arguments.corpus))
    target = load(arguments.target).to(device).eval().requires_grad_(False)
    documents = Documents(training, tokenizer)
    prompts = prefixes(documents, SEED)[: arguments.written]
    written = sample_documents(target, prompts, SEED, device)
    log.info("the target wrote %d documents, %d tokens", len(written), sum(map(len, written)))
    feed = Feed(mixed_stream(documents, written), device)
    validation = torch.from_numpy(Documents(held_out, tokenizer).stream(SEED).astype(np.int64))
    validation = validation.to(device)
    draft = Llama(CONFIG).to(device)
    plan = loop.Plan(
        steps=round(arguments.epochs * feed.epoch_tokens / arguments.batch_tokens),
        batch_tokens=arguments.batch_tokens,
        peak_rate=arguments.rate,
        weight_decay=arguments.weight_decay,
    )
    log.info("%d tokens an epoch, %s", feed.epoch_tokens, plan)
    loop.compile_blocks(target)
    loop.compile_blocks(draft)
    loop.train(
        draft,
        lambda rows: distillation_loss(draft, target, rows, arguments.hard),
        feed,
        plan,
        lambda: loop.describe(loop.loss_by_position(draft, validation)),
    )
    feed.close()
    export(draft, arguments.target, arguments.out)


if __name__ == "__main__":
    main()
