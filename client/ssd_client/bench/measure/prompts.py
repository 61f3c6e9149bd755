"""Prompts of a benchmark: from files, from sets on a hub, or the stories that ship with it."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_client.errors import BadInputError, ClientError

STORIES = "stories"
_HEROES = (
    "a shy lamb", "a brave fox", "a little girl", "an old bear", "two friends", "a tiny dragon",
    "a curious boy", "a rabbit", "a lonely robot", "a kind queen", "a sleepy cat", "a small boat",
)  # fmt: skip
_DEEDS = (
    "who learns to sing", "who crosses the river", "who finds a lost kitten", "who bakes bread",
    "who is afraid of the dark", "who plants a magic seed", "who wants to see the moon",
    "who helps a bird", "who gets lost in the forest", "who shares a big cake",
)  # fmt: skip


@dataclass(frozen=True)
class HubSet:
    """A set as the hub's server of rows knows it."""

    dataset: str
    config: str
    split: str
    column: str


HUB_SETS = {
    "humaneval": HubSet("openai/openai_humaneval", "openai_humaneval", "test", "prompt"),
    "gsm8k": HubSet("openai/gsm8k", "main", "test", "question"),
    "alpaca": HubSet("tatsu-lab/alpaca", "default", "train", "instruction"),
    "ultrafeedback": HubSet("openbmb/UltraFeedback", "default", "train", "instruction"),
}
_HUB = "https://datasets-server.huggingface.co/rows"
_HUB_ROWS = 100  # in one answer
_HUB_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[str, ...]
    in_training: bool  # the shipped models were made for such text


def load_prompts(source: str, count: int, seed: int) -> PromptSet:
    """`count` prompts, or all where there are fewer, in an order that the seed decides."""
    if source == STORIES:
        return PromptSet(STORIES, tuple(_drawn(_stories(), count, seed)), True)
    if source in HUB_SETS:
        return PromptSet(source, tuple(_drawn(_from_hub(source, count), count, seed)), False)
    prompts = _drawn(_from_file(source), count, seed)
    return PromptSet(Path(source).name, tuple(prompts), False)


def _drawn(prompts: Sequence[str], count: int, seed: int) -> list[str]:
    return random.Random(seed).sample(prompts, min(count, len(prompts)))


def _stories() -> list[str]:
    return [f"Tell me a story about {hero} {deed}." for hero in _HEROES for deed in _DEEDS]


def _from_file(path: str) -> list[str]:
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        known = ", ".join([STORIES, *HUB_SETS])
        raise BadInputError(
            f"--data {path}: {error.strerror}; a JSONL file is needed, or one of {known}"
        ) from error
    prompts = [
        _prompt_of(line, f"--data {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise BadInputError(f"--data {path}: no prompts in it")
    return prompts


def _prompt_of(line: bytes, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError:
        raise BadInputError(f"{where}: not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadInputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise BadInputError(f'{where}: an object with a text "prompt" is needed')
    prompt: str = row["prompt"]
    if not prompt.strip():
        raise BadInputError(f"{where}: the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{where}: the prompt has half a character (a surrogate)") from None
    return prompt


def _from_hub(name: str, count: int) -> list[str]:
    prompts: list[str] = []
    while len(prompts) < count:
        page = _page(name, len(prompts), min(_HUB_ROWS, count - len(prompts)))
        if not page:
            break
        prompts += page
    return prompts


def _page(name: str, offset: int, length: int) -> list[str]:
    where = HUB_SETS[name]
    query = urllib.parse.urlencode(
        {
            "dataset": where.dataset,
            "config": where.config,
            "split": where.split,
            "offset": offset,
            "length": length,
        }
    )
    try:
        with urllib.request.urlopen(f"{_HUB}?{query}", timeout=_HUB_TIMEOUT_S) as response:
            rows = json.load(response)["rows"]
        return [str(row["row"][where.column]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ClientError(
            f"--data {name}: the hub cannot be reached ({reason}); a JSONL file with prompts "
            "does the same"
        ) from error
