"""Sections that run real services: exactness, and the three modes side by side."""

import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ssd.v1 import target_pb2 as pb
from ssd_client.local.mps import DRAFT_SHARE, SHARE, share_variables
from tools.bench_kit import Client, Generated, service, story_prompts, wait_until_ready
from tools.gpu.engines import SAMPLING
from tools.gpu.report import FAILED, Rows

PAIRS = (("qwen3-32b", "qwen3-0.6b"), ("llama-3.1-8b", "llama-3.2-1b"))
METRICS = "127.0.0.1:9471"
TIMED = ("--metrics-listen", METRICS)  # of a target whose forwards are timed
MODES = ("off", "sync", "ssd")
MPS_SECONDS = 20.0  # for its end
SHARES = (100, 15, 22, 30, 40)  # percent of the draft; 100: neither has a part of its own
EXACT_SHARES = (15, 30, 50)
MOST_TOKENS = 192  # of a request whose speed is taken


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Two processes share the device at the same time, not in turns."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            # A client may have died in the middle of a kernel.
            with contextlib.suppress(subprocess.TimeoutExpired):
                quit_it = ["nvidia-cuda-mps-control"]
                subprocess.run(quit_it, input=b"quit\n", check=False, timeout=MPS_SECONDS)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


@contextlib.contextmanager
def share(percent: int) -> Iterator[None]:
    """What is started here has this part of the device's multiprocessors."""
    os.environ.update(share_variables(percent))
    try:
        yield
    finally:
        os.environ.pop(SHARE, None)


@dataclass(frozen=True)
class Model:
    """A model, as a service is told of it."""

    name: str  # a shipped one, or a directory
    shape: str = ""  # that it is grown to
    device: str = "cuda"
    threads: int | None = None  # on a CPU; None: the service decides

    @property
    def flags(self) -> list[str]:
        grown = ["--expand-to", self.shape] if self.shape else []
        threads = ["--threads", str(self.threads)] if self.threads else []
        return [self.name, "--device", self.device, *grown, *threads]


@dataclass(frozen=True)
class ModelPair:
    target: Model
    draft: Model


def grown(target: str, draft: str) -> ModelPair:
    """The shipped models in these shapes; an empty one: as it ships."""
    return ModelPair(Model("stories-target", target), Model("stories-draft", draft))


@contextlib.contextmanager
def pair(
    models: ModelPair,
    seqs: int,
    depth: int,
    *more: str,
    budget: int = 24,
    draft_share: int = 100,
) -> Iterator[Client]:
    """A target and its draft. On one GPU each may have a part to itself. ``more``: flags of the
    target; they come last, so that they win."""
    size = ["--max-num-seqs", str(seqs), "--max-model-len", "2048", "--depth", str(depth)]
    drafting, serving = [*size, "--budget", str(budget)], [*size, "--no-auto-off"]
    with _linked(models, drafting, [*serving, "--no-adapt-depth", *more], draft_share) as client:
        yield client


@contextlib.contextmanager
def as_it_comes(
    models: ModelPair, *more: str, draft_share: int = 100, trusted: bool = False
) -> Iterator[Client]:
    """A target and its draft, with no flag that changes their speed. Both have to find room on one
    device: so their contexts are bounded. ``more``: flags of the target."""
    room = ["--max-model-len", "2048"]
    with _linked(models, room, [*room, *more], draft_share, trusted) as client:
        yield client


@contextlib.contextmanager
def _linked(
    models: ModelPair,
    drafting: Sequence[str],
    serving: Sequence[str],
    draft_share: int,
    trusted: bool = False,
) -> Iterator[Client]:
    """A draft and a target with these flags, linked; both start at the same time."""
    draft = models.draft
    inside = ["--draft-model", draft.name]  # of sync, always on the target's device
    inside += ["--draft-expand-to", draft.shape] if draft.shape else []
    with contextlib.ExitStack() as stack:
        with share(draft_share):
            starting = service("ssd_draft", *draft.flags, *drafting, ready=False)
            address = stack.enter_context(starting)
        linked = ["--draft", address, *(["--trust-draft", address] if trusted else [])]
        with share(100 - draft_share or 100):
            target = service("ssd_target", *models.target.flags, *inside, *linked, *serving)
            ready = stack.enter_context(target)
        wait_until_ready(address)
        client = Client(ready)
        client.wait_for_links(1)
        yield client


@dataclass(frozen=True)
class Clock:
    """What the target has counted so far."""

    forwards: float
    forward_seconds: float
    gap_seconds: float

    @classmethod
    def read(cls, metrics: str = METRICS) -> "Clock":
        page = urllib.request.urlopen(f"http://{metrics}/metrics").read().decode()

        def value(name: str) -> float:
            found = re.search(rf"^{name}_total ([\d.e+-]+)", page, re.MULTILINE)
            return float(found.group(1)) if found else 0.0

        names = ("ssd_forwards", "ssd_forward_seconds", "ssd_forward_gap_seconds")
        return cls(*map(value, names))

    def since(self, before: "Clock") -> dict[str, float]:
        count = max(1.0, self.forwards - before.forwards)
        return {
            "forward, ms": 1e3 * (self.forward_seconds - before.forward_seconds) / count,
            "gap, ms": 1e3 * (self.gap_seconds - before.gap_seconds) / count,
        }


# Exactness


def exact(num_prompts: int, tokens: int, temperature: float) -> Rows:
    return _exact(num_prompts, tokens, (temperature,), DRAFT_SHARE)


def exact_shares(num_prompts: int, tokens: int) -> Rows:
    """The draft with parts of several sizes: a part decides which kernels a service uses."""
    return [
        {"draft's part, %": part, **row}
        for part in EXACT_SHARES
        for row in _exact(num_prompts, tokens, (0.0, 1.0), part)
    ]


def _exact(num_prompts: int, tokens: int, temperatures: Sequence[float], draft_share: int) -> Rows:
    """One server: three modes, alone and 8 at a time, a second turn, a resume half way."""
    prompts = story_prompts(num_prompts, seed=1)
    rows: Rows = []
    flags = ("--prefill-chunk", "64")
    with mps(), pair(grown(*PAIRS[1]), 8, 5, *flags, draft_share=draft_share) as client:
        for temperature in temperatures:
            checked = Checked(client, prompts, tokens, temperature)
            for check in (checked.alone, checked.together, checked.second_turn, checked.resumed):
                rows += [check(mode) for mode in MODES]
    return rows


def against(done: Sequence[Generated], expected: Sequence[list[int]]) -> dict[str, Any]:
    """How much of what was generated is as expected; a difference fails the section."""
    both = list(zip([one.tokens for one in done], expected, strict=True))
    pairs = [pair for a, b in both for pair in zip(a, b, strict=False)]
    equal = sum(a == b for a, b in both)
    return {
        "texts equal": f"{equal} of {len(both)}",
        "tokens equal": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
        **({FAILED: f"{len(both) - equal} texts differ"} if equal < len(both) else {}),
    }


class Checked:
    """Texts of one temperature, held against those of plain decoding."""

    def __init__(
        self, client: Client, prompts: Sequence[str], tokens: int, temperature: float
    ) -> None:
        self._client, self._prompts, self._tokens = client, prompts, tokens
        self._temperature = temperature
        self._plain: list[list[int]] = []
        self._texts: list[str] = []
        self._turns: list[list[int]] = []

    def alone(self, mode: str) -> dict[str, Any]:
        done = [self._one(prompt, mode) for prompt in self._prompts]
        if mode == "off":
            self._plain = [one.tokens for one in done]
            self._texts = [one.text for one in done]
        return self._row(mode, "alone", done, self._plain)

    def together(self, mode: str) -> dict[str, Any]:
        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(lambda prompt: self._one(prompt, mode), self._prompts))
        return self._row(mode, "8 at a time", done, self._plain)

    def second_turn(self, mode: str) -> dict[str, Any]:
        """The first turn is part of the prompt now, and its beginning is in the cache."""
        few = len(self._prompts) // 4
        done = [
            self._client.generate(
                "And what happened on the next day?",
                mode,
                self._tokens // 4,
                temperature=self._temperature,
                seed=6,
                before=[("user", prompt), ("assistant", text)],
            )
            for prompt, text in zip(self._prompts[:few], self._texts[:few], strict=True)
        ]
        if mode == "off":
            self._turns = [one.tokens for one in done]
        row = self._row(mode, "second turn", done, self._turns)
        return {**row, "cached": sum(one.cached for one in done)}

    def resumed(self, mode: str) -> dict[str, Any]:
        half = self._tokens // 2
        prompts = list(zip(self._prompts, self._plain, strict=True))[: len(self._prompts) // 4]
        done = [
            self._client.generate(
                prompt,
                mode,
                self._tokens,
                temperature=self._temperature,
                seed=5,
                generated=text[:half],
            )
            for prompt, text in prompts
        ]
        return self._row(mode, "resumed half way", done, [text[half:] for _, text in prompts])

    def _one(self, prompt: str, mode: str) -> Generated:
        temperature = self._temperature
        return self._client.generate(prompt, mode, self._tokens, temperature=temperature, seed=5)

    def _row(
        self, mode: str, how: str, done: Sequence[Generated], expected: Sequence[list[int]]
    ) -> dict[str, Any]:
        stats = [one.stats for one in done]
        return {
            "T": self._temperature,
            "mode": mode,
            "how": how,
            **against(done, expected),
            "hits": sum(s.hits for s in stats),
            "late": sum(s.late for s in stats),
            "missed": sum(s.length_misses + s.token_misses for s in stats),
            "rejections": sum(s.rejected_rounds for s in stats),
            "full": sum(s.full_rounds for s in stats),
        }


# Speed


def modes(num_prompts: int, tokens: int, pairs: Sequence[tuple[str, str]] = PAIRS) -> Rows:
    """One GPU under MPS, flags as they come: the draft with a part of its own, and, for the modes
    that need no draft beside them, the target with all of it."""
    found: Rows = []
    for target, draft in pairs:
        name, rows = f"{target}, {draft}", []
        for part, kinds in ((DRAFT_SHARE, (*MODES, "not named")), (100, MODES[:2])):
            where = f"draft {part} %" if part < 100 else "no draft beside it"
            with mps(), as_it_comes(grown(target, draft), *TIMED, draft_share=part) as client:
                rows += _modes(client, name, where, num_prompts, tokens, kinds)
        found += _with_theory(rows)
    return found


def modes_with_draft_on_cpu(num_prompts: int, tokens: int) -> Rows:
    """The draft on the host's cores, as it ships: no part of the GPU is its."""
    found: Rows = []
    for target, _ in PAIRS:
        name = f"{target}, draft ungrown"
        draft = Model("stories-draft", device="cpu", threads=4)
        models = ModelPair(Model("stories-target", target), draft)
        with as_it_comes(models, *TIMED) as client:
            rows = _modes(client, name, "draft on CPU", num_prompts, tokens, MODES)
        found += _with_theory(rows)
    return found


def _modes(
    client: Client, name: str, where: str, num_prompts: int, tokens: int, kinds: Sequence[str]
) -> Rows:
    timed = story_prompts(min(num_prompts, 8), seed=12)
    tokens = min(tokens, MOST_TOKENS)
    rows: Rows = []
    for mode in kinds:
        for seed, prompt in enumerate(story_prompts(3, seed=11)):  # warm, and measured
            client.generate(prompt, mode, tokens, seed=seed, **SAMPLING)
        before = Clock.read()
        done = [
            client.generate(prompt, mode, tokens, seed=seed, **SAMPLING)
            for seed, prompt in enumerate(timed)
        ]
        clock = Clock.read().since(before)
        about = {"pair": name, "where": where, "mode": mode}
        rows.append({**about, **mode_row(done, mode), **clock})
    return rows


def shares(num_prompts: int) -> Rows:
    """The 32B pair on one GPU, the draft with parts of several sizes."""
    models, rows = grown(*PAIRS[0]), []
    prompts = story_prompts(min(num_prompts, 4), seed=15)
    flags = ("--backup", "jit", *TIMED)
    for part in SHARES:
        with mps(), pair(models, 1, 7, *flags, draft_share=part) as client:
            for mode in ("off", "ssd"):
                client.generate(prompts[0], mode, 32)
            before = Clock.read()
            client.generate(prompts[0], "off", 48)
            alone = Clock.read().since(before)["forward, ms"]
            before = Clock.read()
            done = [client.generate(prompt, "ssd", 128, 7) for prompt in prompts]
            about = {"draft's part, %": part, "forward alone, ms": alone}
            rows.append({**about, **mode_row(done, "ssd"), **Clock.read().since(before)})
    return rows


def _with_theory(rows: Rows) -> Rows:
    """T_SD, the ceiling of theorem 7 over sync, and what the target's forward loses to a draft
    that computes beside it. Sync is that which has the whole GPU."""
    ssd = next(row for row in rows if row["mode"] == "ssd")
    plain, sync = (
        next(row for row in reversed(rows) if row["mode"] == mode) for mode in ("off", "sync")
    )
    round_ms = 1e3 * sync["tokens/round"] / sync["tokens/s"]
    sync["T_SD"] = round_ms / plain["forward, ms"] - 1
    if ssd["E_hit"]:
        ssd["ceiling"] = (1 + sync["T_SD"]) * ssd["E_hit"] / sync["tokens/round"]
    ssd["against sync"] = ssd["tokens/s"] / sync["tokens/s"]
    ssd["lost to contention"] = 1 - plain["forward, ms"] / ssd["forward, ms"]
    return rows


def mode_row(done: Sequence[Generated], mode: str) -> dict[str, Any]:
    stats = [one.stats for one in done]
    rounds = max(1, sum(s.rounds for s in stats))
    cache = sum(s.cache_rounds for s in stats)
    return {
        "tokens/s": statistics.median(one.rate for one in done),
        "tokens/round": sum(len(one.tokens) - 1 for one in done) / rounds if mode != "off" else 1.0,
        "E_hit": _per(stats, lambda s: s.cache_tokens + s.cache_rounds, cache),
        "E_miss": _per(
            stats,
            lambda s: s.accepted_tokens - s.cache_tokens + s.rounds - s.cache_rounds,
            rounds - cache,
        ),
        "hit rate": sum(s.hits for s in stats) / rounds,
        "from the cache": cache / rounds,
    }


def _per(
    stats: Sequence[pb.SpeculationStats], value: Callable[[Any], float], count: int
) -> float | str:
    return sum(map(value, stats)) / count if count else ""
