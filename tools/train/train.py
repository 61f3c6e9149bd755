"""Train the target:

python -m tools.train.train --corpus stories.jsonl.xz --tokenizer DIR --out DIR
"""

import argparse
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train import loop
from tools.train.data import SEED, Documents, Feed, read_corpus, split
from tools.train.export import export
from tools.train.model import Llama, llama_config

log = logging.getLogger("target")

CONFIG = llama_config(hidden=256, layers=8, heads=8, kv_heads=4, mlp=1024)


@torch.compile(dynamic=False)
def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over logits [n, length, vocabulary] and the tokens [n, length] that follow."""
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def next_token_loss(model: Llama, rows: Tensor) -> Tensor:
    """rows [n, length + 1]"""
    with loop.autocast(rows.device):
        logits = model(rows[:, :-1])
    return cross_entropy(logits, rows[:, 1:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the target.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="from tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--epochs", type=float, default=14)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    training, held_out = split(read_corpus(arguments.corpus))
    feed = Feed(Documents(training, tokenizer).stream, arguments.device)
    validation = torch.from_numpy(Documents(held_out, tokenizer).stream(SEED).astype(np.int64))
    validation = validation.to(arguments.device)
    model = Llama(CONFIG, arguments.dropout).to(arguments.device)
    plan = loop.Plan(
        steps=round(arguments.epochs * feed.epoch_tokens / arguments.batch_tokens),
        batch_tokens=arguments.batch_tokens,
        peak_rate=arguments.rate,
        weight_decay=arguments.weight_decay,
    )
    log.info("%d tokens an epoch, %s", feed.epoch_tokens, plan)
    loop.compile_blocks(model)
    loop.train(
        model,
        lambda rows: next_token_loss(model, rows),
        feed,
        plan,
        lambda: loop.describe(loop.loss_by_position(model, validation)),
    )
    feed.close()
    export(model, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
