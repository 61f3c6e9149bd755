"""Train a head for the target:

python -m tools.train.head --corpus stories.jsonl.xz --target DIR --out DIR

As the draft, it learns the target's distribution on the corpus and on text that the target itself
wrote; and to go on from its own states, for as many steps as it will draft.
"""

import argparse
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from ssd_engine.checkpoints.heads.head_config import default_boundaries
from tools.train import loop
from tools.train.data import SEED, Documents, Feed, read_corpus, rows_of, split
from tools.train.distill import mixed_stream
from tools.train.head_model import (
    TRAINED_STEPS,
    Head,
    export_head,
    load_trained_head,
    watched,
    widened,
)
from tools.train.model import Llama, load
from tools.train.sample import prefixes, sample_documents

log = logging.getLogger("head")

ROW = 512  # tokens of a row: later steps attend without a fused kernel
DECAY = 0.8  # of a step's weight, against the one before it


def steps_of(head: Head, target: Llama, rows: Tensor, steps: int) -> tuple[list[Tensor], Tensor]:
    """What the head says at each step, and what the target says. rows [n, length + 1]

    At step k its row j tells what the target's row j + 1 + k does.
    """
    with loop.autocast(rows.device):
        with torch.no_grad():
            features, wanted = watched(target, rows, head.boundaries)
            embedded = target.model.embed_tokens(rows[:, 1:])
        return head(embedded, features[:, :-1], steps), wanted


def head_loss(head: Head, target: Llama, rows: Tensor, steps: int, hard: float) -> Tensor:
    """The divergence of distill.py at each step; what depends on the target alone is made once."""
    said, wanted = steps_of(head, target, rows, steps)
    with torch.no_grad():
        log_p = F.log_softmax(wanted.float(), dim=-1)
        shares = (1 - hard) * log_p.exp()
        known = (shares * log_p).sum(-1)
        best = log_p.argmax(-1, keepdim=True)
        shares.scatter_add_(-1, best, torch.full_like(best, hard, dtype=shares.dtype))
    total, weights = torch.zeros((), device=rows.device), 0.0
    for k, logits in enumerate(map(Tensor.float, said)):
        surprise = logits.logsumexp(-1) - (shares[:, 1 + k :] * logits).sum(-1)
        total = total + DECAY**k * (known[:, 1 + k :] + surprise).mean()
        weights += DECAY**k
    return total / weights


@torch.no_grad()
def describe(head: Head, target: Llama, stream: Tensor, steps: int, batch: int = 16) -> str:
    """How often the head says what the target says, at each step of rows of held-out text."""
    right, total = torch.zeros(steps), torch.zeros(steps)
    for rows in rows_of(stream, ROW)[: 4 * batch].split(batch):
        said, wanted = steps_of(head, target, rows, steps)
        for k, logits in enumerate(said):
            same = logits.argmax(-1) == wanted[:, 1 + k :].argmax(-1)
            right[k] += same.sum().cpu()
            total[k] += same.numel()
    return "as the target: " + " ".join(f"{share:.3f}" for share in (right / total).tolist())


def first_head(target: Llama, boundaries: list[int] | None, begin_with: Path | None) -> Head:
    """``boundaries``: None for those of the head to go on from, or else the usual ones."""
    if begin_with is not None:
        begun = load_trained_head(begin_with, target.config)
        return widened(begun, tuple(boundaries or begun.boundaries))
    head = Head(
        target.config, tuple(boundaries or default_boundaries(target.config.num_hidden_layers))
    )
    head.begin_as(target)
    return head


class HeadPlan(loop.Plan):
    def row_at(self, step: int) -> int:
        return ROW


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a head.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines, plain or .xz")
    parser.add_argument("--target", type=Path, required=True, help="from train.py")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=TRAINED_STEPS, help="drafted in a row")
    parser.add_argument("--hard", type=float, default=0.1, help="share of the argmax term")
    parser.add_argument(
        "--boundaries",
        type=int,
        nargs="+",
        help="of the target, that it reads (those of --begin-with, or the usual ones)",
    )
    parser.add_argument("--begin-with", type=Path, help="a head of this target to go on from")
    parser.add_argument("--written", type=int, help="stories the target writes, 0 for none")
    parser.add_argument("--stories", type=int, help="of the corpus, for a trial")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.manual_seed(SEED)
    device = arguments.device
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    training, held_out = split(read_corpus(arguments.corpus))
    target = load(arguments.target).to(device).eval().requires_grad_(False)
    documents = Documents(training[: arguments.stories], tokenizer)
    prompts = prefixes(documents, SEED)[: arguments.written]
    written = sample_documents(target, prompts, SEED, device)
    feed = Feed(mixed_stream(documents, written), device)
    validation = torch.from_numpy(Documents(held_out, tokenizer).stream(SEED).astype(np.int64))
    validation = validation.to(device)
    head = first_head(target, arguments.boundaries, arguments.begin_with).to(device)
    plan = HeadPlan(
        steps=round(arguments.epochs * feed.epoch_tokens / arguments.batch_tokens),
        batch_tokens=arguments.batch_tokens,
        peak_rate=arguments.rate,
        weight_decay=arguments.weight_decay,
    )
    log.info("%d tokens an epoch, %s", feed.epoch_tokens, plan)
    loop.train(
        head,
        lambda rows: head_loss(head, target, rows, arguments.steps, arguments.hard),
        feed,
        plan,
        lambda: describe(head, target, validation, arguments.steps),
    )
    feed.close()
    export_head(head, arguments.out, arguments.target.name)


if __name__ == "__main__":
    main()
