"""A section on dense random weights.

In a grown model most weights are filler that reaches no logit: a kernel could leave them out, and
no text would change. Here every weight counts. Whatever is speculated, and however it ends, the
tokens are those of plain decoding.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_client.local.mps import DRAFT_SHARE
from tools.bench_kit import Client, Generated, story_prompts
from tools.gpu import engines
from tools.gpu.dense_checkpoint import write_dense, write_noisy
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import MODES, Model, ModelPair, against, mps, pair
from tools.gpu.shapes import SHAPES

TARGET, RANDOM_DRAFT = "qwen2.5-7b", "qwen2.5-0.5b"  # of one vocabulary
# Rows of the draft's head that are no token's, and how many more the target has: as published.
PADDING, MORE_PADDING = 271, 128
# Layers of the target add less and less, so that a copy of the first ones, which takes a part of
# the time, is right as a draft about three times out of four.
FADING, FEWER = 0.6, 4
MOST_PROMPTS, MOST_TOKENS = 8, 96
TOGETHER = 8
SEED = 5

# What a round can meet, by the counter that tells.
KINDS = {
    "hits": "hits",
    "late": "late",
    "length misses": "length_misses",
    "token misses": "token_misses",
    "rejections": "rejected_rounds",
    "full acceptances": "full_rounds",
}
_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
# By temperature, options that prompts take in turn.
OPTIONS: dict[float, Sequence[Mapping[str, Any]]] = {
    0.0: ({},),
    1.0: ({"top_p": 0.9, **_PENALTIES}, {"top_p": 0.9, "top_k": 40, **_PENALTIES}, {}),
}


@dataclass(frozen=True)
class Setting:
    """A draft, and which rounds are to be expected of it."""

    draft: str  # "random", or "noisy copy" of the target's first layers
    seqs: int  # that the target has room for
    depth: int
    budget: int
    request_depths: Sequence[int] = (0,)  # that ssd's prompts ask for in turn; 0: the depth above
    draft_share: int = DRAFT_SHARE  # percent of the device


SETTINGS = (
    # Nothing is right.
    Setting("random", seqs=8, depth=3, budget=12),
    # Most is right, as layers fade. On a fifth of the device a step takes so long that branches of
    # one token are ready before it ends, and those of four may be late. With one branch for a
    # round, all lengths but one have none.
    Setting("noisy copy", seqs=8, depth=4, budget=1, request_depths=(0, 1), draft_share=80),
)


def dense(
    num_prompts: int,
    tokens: int,
    settings: Sequence[Setting] = SETTINGS,
    device: str = "cuda",
    changes: Mapping[str, Any] | None = None,
) -> Rows:
    """Without a GPU neither service has a part of it. ``changes``: of the models' config.json."""
    prompts = story_prompts(min(num_prompts, MOST_PROMPTS), seed=16)
    tokens = min(tokens, MOST_TOKENS)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        target = _write_target(Path(folder) / "target", changes)
        for setting in settings:
            path = Path(folder) / setting.draft.replace(" ", "-")
            draft = _write_draft(setting.draft, target, path, changes)
            engines.free_memory()
            models = ModelPair(Model(str(target), device=device), Model(str(draft), device=device))
            with _serve(models, setting, device) as client:
                rows += Compared(client, setting, prompts, tokens).rows()
    return [*rows, *summaries(rows)]


def _write_target(folder: Path, changes: Mapping[str, Any] | None) -> Path:
    rows = _head_rows(changes) + MORE_PADDING
    more = {**(changes or {}), "vocab_size": rows}
    padding = PADDING + MORE_PADDING
    return write_dense(TARGET, folder, changes=more, padding=padding, fading=FADING)


def _head_rows(changes: Mapping[str, Any] | None) -> int:
    rows: int = {**SHAPES[RANDOM_DRAFT], **(changes or {})}["vocab_size"]
    return rows


def _write_draft(name: str, target: Path, folder: Path, changes: Mapping[str, Any] | None) -> Path:
    if name == "random":
        return write_dense(RANDOM_DRAFT, folder, seed=1, changes=changes, padding=PADDING)
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    return write_noisy(target, folder, rows=_head_rows(changes), layers=-(-layers // FEWER))


@contextlib.contextmanager
def _serve(models: ModelPair, setting: Setting, device: str) -> Iterator[Client]:
    flags = ("--prefill-chunk", "64", "--max-num-seqs", str(setting.seqs))
    on_gpu = device == "cuda"
    with (
        mps() if on_gpu else contextlib.nullcontext(),
        pair(
            models,
            TOGETHER,
            setting.depth,
            *flags,
            budget=setting.budget,
            draft_share=setting.draft_share if on_gpu else 100,
        ) as client,
    ):
        yield client


class Compared:
    """Every mode beside one draft, held against plain decoding of one prompt at a time."""

    def __init__(
        self, client: Client, setting: Setting, prompts: Sequence[str], tokens: int
    ) -> None:
        self._client, self._setting = client, setting
        self._prompts, self._tokens = prompts, tokens

    def rows(self) -> Rows:
        return [row for temperature in OPTIONS for row in self._rows(temperature)]

    def _rows(self, temperature: float) -> Rows:
        plain: list[list[int]] = []
        rows: Rows = []
        for how, at_a_time in (("alone", 1), (f"{TOGETHER} at a time", TOGETHER)):
            for mode in MODES:
                begin = time.monotonic()
                done = self._generate(mode, temperature, at_a_time)
                seconds = time.monotonic() - begin
                plain = plain or [one.tokens for one in done]
                about = {"draft": self._setting.draft, "T": temperature, "mode": mode, "how": how}
                row = {**about, **against(done, plain), **_counts(done), "seconds": seconds}
                print(row, flush=True)  # the whole takes a while
                rows.append(row)
        return rows

    def _generate(self, mode: str, temperature: float, at_a_time: int) -> list[Generated]:
        depths = self._setting.request_depths if mode == "ssd" else (0,)
        options = OPTIONS[temperature]

        def one(number: int) -> Generated:
            return self._client.generate(
                self._prompts[number],
                mode,
                self._tokens,
                depths[number % len(depths)],
                temperature,
                SEED,
                **options[number % len(options)],
            )

        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(one, range(len(self._prompts))))


def _counts(done: Sequence[Generated]) -> dict[str, int]:
    return {
        kind: sum(getattr(one.stats, counter) for one in done) for kind, counter in KINDS.items()
    }


def summaries(rows: Rows) -> Rows:
    """What was met beside each draft, and in all; what was never met fails the section."""
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    each = [_summary(draft, [row for row in rows if row["draft"] == draft]) for draft in drafts]
    whole = _summary("all", rows)
    if whole["never met"]:
        whole[FAILED] = f"never met: {whole['never met']}"
    return [*each, whole]


def _summary(draft: str, rows: Rows) -> dict[str, Any]:
    sums = {kind: sum(row[kind] for row in rows) for kind in KINDS}
    seconds = sum(row["seconds"] for row in rows)
    never = ", ".join(kind for kind, count in sums.items() if not count)
    return {"draft": draft, "mode": "all", **sums, "seconds": seconds, "never met": never}
