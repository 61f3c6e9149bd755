"""Streams of a gateway as an application reads them, and what became of each."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import httpx2

from tools.bench_kit import story_prompts

READ_SECONDS = 180.0  # in which nothing came: the stream hangs
TOKENS = 480
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    # Texts that begin like one of them are held back, and none ever comes.
    {"temperature": 0.8, "stop": [" and so the zebra", ". The zebra", "\n\nThe zebra"]},
)


class Verdict(StrEnum):
    EQUAL = "equal"
    ERROR = "told an error"
    CUT = "cut off"  # the connection broke, which HTTP tells from an end
    LOST = "lost"  # another text, an end that looks like one and is none, or a stream that hangs


@dataclass
class Heard:
    """What a stream has said, and how it has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    done: bool = False  # [DONE] came
    error: str | None = None  # that it was told
    cut: str | None = None  # how its connection broke

    def take(self, choice: dict[str, Any]) -> None:
        self.text += choice["text"]
        self.token_ids += choice["token_ids"]
        self.finish = choice["finish_reason"]
        if choice["logprobs"] is not None:
            fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            self.logprobs += zip(*(choice["logprobs"][each] for each in fields), strict=True)

    def begins(self, other: "Heard") -> bool:
        """True if the other could go on from here."""
        count, told = len(self.token_ids), len(self.logprobs)
        return (
            other.text.startswith(self.text)
            and other.token_ids[:count] == self.token_ids
            and other.logprobs[:told] == self.logprobs
        )


def judge(heard: Heard, expected: Heard) -> Verdict:
    """Whatever looks like an answer must be the whole one."""
    if heard.error is None and heard.cut is None:
        return Verdict.EQUAL if heard.done and heard == expected else Verdict.LOST
    if not heard.begins(expected):
        return Verdict.LOST
    return Verdict.CUT if heard.error is None else Verdict.ERROR


def requests(seed: int) -> list[dict[str, Any]]:
    """Each of another kind."""
    base = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    prompts = story_prompts(len(KINDS), seed)
    return [
        {**base, **kind, "prompt": prompt, "seed": seed + number}
        for number, (kind, prompt) in enumerate(zip(KINDS, prompts, strict=True))
    ]


class Stream(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, address: str, content: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._address, self._content = address, content
        self.heard = Heard()
        self._times: list[float] = []

    def run(self) -> None:
        try:
            self._read()
        except httpx2.TimeoutException:
            pass  # it hangs, and its reader was told nothing
        except httpx2.HTTPError as error:
            self.heard.cut = f"{type(error).__name__}: {error}"
        self._times.append(time.monotonic())

    def _read(self) -> None:
        url = f"http://{self._address}/v1/completions"
        with (
            httpx2.Client(timeout=READ_SECONDS, trust_env=False) as client,
            client.stream("POST", url, json=self._content) as answer,
        ):
            if answer.is_error:
                self.heard.error = f"{answer.status_code}: {answer.read().decode()}"
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.heard.done = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.heard.error = chunk["error"]["message"]
            return
        self._times.append(time.monotonic())
        for choice in chunk["choices"]:
            self.heard.take(choice)

    def longest_gap(self, since: float) -> float:
        return longest_gap(self._times, since)


def longest_gap(times: Sequence[float], since: float) -> float:
    """Seconds between two chunks, or the last one and the end; the later one came since."""
    return max((b - a for a, b in pairwise(times) if b > since), default=0.0)


def begin(address: str, contents: list[dict[str, Any]]) -> list[Stream]:
    streams = [Stream(address, content) for content in contents]
    for stream in streams:
        stream.start()
    return streams


def finish(streams: list[Stream]) -> list[Heard]:
    for stream in streams:
        stream.join()
    return [stream.heard for stream in streams]
