"""The corpus: reading it, holding part of it out, and laying it out as endless packed rows.

A document is one of

    <|bos|><|user|>request<|story|>story<|eos|>      chat, about 70 %
    <|bos|>story<|eos|>                              plain, about 30 %

Documents follow one another in a single stream that is cut into rows, without a mask between
documents: the model learns by itself that ``<|bos|>`` ends what came before.
"""

import json
import lzma
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

SEED = 20
HELD_OUT_SHARE = 0.01
CHAT_SHARE = 0.7
FOLLOW_UP_SHARE = 0.1
CANONICAL_SHARE = 0.6
PERIOD_SHARE = 0.75

CANONICAL = "Tell me a story about"
OPENINGS = (
    "Write a story about",
    "Please tell me a story about",
    "Tell me a short story about",
    "Write me a short story about",
    "I would like to hear a story about",
    "Make up a story about",
    "A story about",
)


@dataclass(frozen=True)
class Story:
    prompt: str
    text: str


def read_corpus(path: Path) -> list[Story]:
    """Read JSON lines with the keys ``prompt`` and ``story``, plain or xz-compressed."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [Story(record["prompt"], record["story"]) for record in records]


def split(stories: list[Story], seed: int = SEED) -> tuple[list[Story], list[Story]]:
    """Return (training, held-out) stories.

    A third of the prompts occur more than once. Whole prompts are held out, so that neither the
    held-out stories nor their prompts were seen in training.
    """
    prompts = sorted({story.prompt for story in stories})
    random.Random(seed).shuffle(prompts)
    sizes = dict.fromkeys(prompts, 0)
    for story in stories:
        sizes[story.prompt] += 1
    held_out: set[str] = set()
    missing = round(HELD_OUT_SHARE * len(stories))
    for prompt in prompts:
        if missing <= 0:
            break
        held_out.add(prompt)
        missing -= sizes[prompt]
    return (
        [story for story in stories if story.prompt not in held_out],
        [story for story in stories if story.prompt in held_out],
    )


def canonical_request(prompt: str) -> str:
    return f"{CANONICAL} {prompt}."


def varied_request(prompt: str, rng: random.Random) -> str:
    """Phrase the request as one of several users would; most often the canonical way."""
    opening = CANONICAL if rng.random() < CANONICAL_SHARE else rng.choice(OPENINGS)
    return f"{opening} {prompt}" + ("." if rng.random() < PERIOD_SHARE else "")


def encode(tokenizer: Tokenizer, texts: list[str], batch: int = 8192) -> list[np.ndarray]:
    """Token ids of each text, without special tokens. Batched because encodings are large."""
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), batch):
        encodings = tokenizer.encode_batch_fast(
            texts[start : start + batch], add_special_tokens=False
        )
        ids.extend(np.array(encoding.ids, dtype=np.uint16) for encoding in encodings)
    return ids


class Layout:
    """Puts the special tokens around requests and stories."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bos, self.eos, self.user, self.story = (
            np.array([tokenizer.token_to_id(f"<|{name}|>")], dtype=np.uint16)
            for name in ("bos", "eos", "user", "story")
        )

    def chat_prefix(self, request: np.ndarray) -> np.ndarray:
        return np.concatenate([self.bos, self.user, request, self.story])

    def plain_prefix(self, beginning: np.ndarray) -> np.ndarray:
        return np.concatenate([self.bos, beginning])


class Documents:
    """Tokenised stories, laid out anew for every epoch: order, format and phrasing are redrawn."""

    def __init__(self, stories: list[Story], tokenizer: Tokenizer) -> None:
        self.prompts = [story.prompt for story in stories]
        self.texts = encode(tokenizer, [story.text for story in stories])
        self.tokenizer = tokenizer
        self.layout = Layout(tokenizer)

    def laid_out(self, seed: int) -> list[np.ndarray]:
        """Every story once, as a document, in random order."""
        rng = random.Random(seed)
        requests = encode(self.tokenizer, [varied_request(p, rng) for p in self.prompts])
        order = list(range(len(self.texts)))
        rng.shuffle(order)
        documents: list[np.ndarray] = []
        for index in order:
            prefix = self.layout.bos
            if rng.random() < CHAT_SHARE:
                prefix = self.layout.chat_prefix(requests[index])
                # Without its <|bos|> a chat document is a further turn of what came before.
                prefix = prefix[int(rng.random() < FOLLOW_UP_SHARE) :]
            documents.append(np.concatenate([prefix, self.texts[index], self.layout.eos]))
        return documents

    def stream(self, seed: int) -> np.ndarray:
        return np.concatenate(self.laid_out(seed))


def rows_of(stream: torch.Tensor, length: int) -> torch.Tensor:
    """Cut a stream into rows of ``length`` predictions: [rows, length + 1], overlapping by one."""
    return stream.unfold(0, length + 1, length)


class Feed:
    """Endless batches on the device. The next epoch is laid out while this one is consumed."""

    def __init__(self, stream_of_epoch: Callable[[int], np.ndarray], device: torch.device) -> None:
        self._stream_of_epoch = stream_of_epoch
        self._device = device
        self._worker = ThreadPoolExecutor(1)
        self._epoch = 0
        self._next = self._worker.submit(stream_of_epoch, 0)
        self._advance()
        self.epoch_tokens = len(self._stream)

    def _advance(self) -> None:
        self._stream = torch.from_numpy(self._next.result().astype(np.int64)).to(self._device)
        self._offset = 0
        self._epoch += 1
        self._next = self._worker.submit(self._stream_of_epoch, self._epoch)

    def take(self, rows: int, length: int) -> torch.Tensor:
        """The next batch, [rows, length + 1]. A remainder too short for a batch is skipped."""
        if self._offset + rows * length + 1 > len(self._stream):
            self._advance()
        part = self._stream[self._offset : self._offset + rows * length + 1]
        self._offset += rows * length
        return rows_of(part, length)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
