"""Text sampled from the target, for the draft to learn from."""

import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.train.data import CHAT_SHARE, Documents, encode, varied_request
from tools.train.loop import autocast
from tools.train.model import Cache, Llama

log = logging.getLogger("sample")

# cuDNN is left out: it would build a plan for every length of the cache, that is for every token.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
BEGINNINGS = (2, 4, 8)
BATCH = 16384
LEAST = 1024


def prefixes(documents: Documents, seed: int) -> list[np.ndarray]:
    """What the target is asked to continue: requests, and the first words of stories."""
    rng = random.Random(seed)
    requests = encode(documents.tokenizer, [varied_request(p, rng) for p in documents.prompts])
    layout = documents.layout
    return [
        layout.chat_prefix(request)
        if rng.random() < CHAT_SHARE
        else layout.plain_prefix(text[: rng.choice(BEGINNINGS)])
        for request, text in zip(requests, documents.texts, strict=True)
    ]


def equal_lengths(texts: list[np.ndarray], limit: int, least: int = 1) -> Iterator[np.ndarray]:
    """Batches [rows, length] of texts of one length, so that no padding or mask is needed.

    Batches of fewer than ``least`` rows are left out: they take as long as full ones.
    """
    groups: dict[int, list[np.ndarray]] = defaultdict(list)
    for text in texts:
        groups[len(text)].append(text)
    for group in groups.values():
        for start in range(0, len(group), limit):
            batch = group[start : start + limit]
            if len(batch) >= least:
                yield np.stack(batch)


@torch.no_grad()
def continue_batch(
    model: Llama, prompt: Tensor, temperature: Tensor, room: int, generator: torch.Generator
) -> Tensor:
    """Continue prompt [rows, p] up to ``room`` tokens in all; a row goes on after its <|eos|>.

    temperature [rows, 1]. Adding temperature times Gumbel noise samples from the softmax at that
    temperature, and is greedy at zero.
    """
    cache = Cache(model.config, len(prompt), room, prompt)
    tokens, new = prompt, prompt
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    while tokens.shape[1] < room and not ended.all():
        with autocast(prompt.device), sdpa_kernel(ATTENTION):
            scores = model.logits(model.model(new, cache)[:, -1]).float()
        noise = torch.empty_like(scores).exponential_(generator=generator).log_().neg_()
        new = scores.add_(noise * temperature).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, new), dim=1)
        ended |= new[:, 0] == model.config.eos_token_id
    return tokens


def sample_documents(
    model: Llama, prompts: list[np.ndarray], seed: int, device: torch.device, room: int = 320
) -> list[np.ndarray]:
    """Let the target continue the prompts at mixed temperatures; overlong texts are dropped."""
    model.eval()
    generator = torch.Generator(device).manual_seed(seed)
    choices = torch.tensor(TEMPERATURES, device=device)
    sampled: list[np.ndarray] = []
    began = time.monotonic()
    for batch in equal_lengths(prompts, BATCH, min(LEAST, len(prompts) // 16)):
        prompt = torch.from_numpy(batch.astype(np.int64)).to(device)
        drawn = torch.randint(len(choices), (len(prompt), 1), generator=generator, device=device)
        tokens = continue_batch(model, prompt, choices[drawn], room, generator)
        sampled.extend(_up_to_eos(tokens, batch.shape[1], model.config.eos_token_id))
        log.info("%d documents after %.0f s", len(sampled), time.monotonic() - began)
    return sampled


def _up_to_eos(tokens: Tensor, prompt: int, eos: int) -> Iterator[np.ndarray]:
    ends = (tokens[:, prompt:] == eos).int()
    lengths = (prompt + 1 + ends.argmax(1)).tolist()
    finished = ends.any(1).tolist()
    for row, length, done in zip(tokens.cpu().numpy(), lengths, finished, strict=True):
        if done:
            yield row[:length].astype(np.uint16)
