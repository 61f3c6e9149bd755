"""Sections that run engines inside their own process."""

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.layer_ops import TorchOps
from ssd_target.records.speculation_options import Mode
from tools.gpu import engines
from tools.gpu.attention_check import check_attention, flashinfer, paged
from tools.gpu.report import Rows

TARGETS = ("llama-3.1-8b", "qwen3-32b")
VLLM_MS = {("llama-3.1-8b", 1): 4.95, ("qwen3-32b", 1): 19.04, ("llama-3.1-8b", 8): 5.16}
DRAFTS = {"llama-3.2-1b": 1.1, "qwen3-0.6b": 0.9}  # milliseconds that a tree step may take
DEPTH = 7


def attention(cases: int) -> Rows:
    kinds = {
        "FlashInfer, exact": flashinfer(exact=True),
        "FlashInfer": flashinfer(exact=False),
        "Triton": paged,
    }
    return [
        {"backend": name, **result}
        for name, factory in kinds.items()
        for result in check_attention(0, cases, factory)
    ]


def memcheck() -> Rows:
    """Under compute-sanitizer every use once, with short contexts: it is slow; and our sources."""
    tests = ("kernels/products/test_cuda_products.py",)
    checks = {
        "attention": ["-m", "tools.gpu.attention_check", "--cases", "2", "--longest", "700"],
        "kernels of steps": ["-m", "pytest", "-q", "-k", "64 or 250 or 1024", *_engine(tests)],
    }
    rows: Rows = []
    for name, what in checks.items():
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
        command += [sys.executable, *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
        rows.append({"memcheck of": name, "exit code": done.returncode, "says": " ".join(lines)})
    return rows


def _engine(tests: Sequence[str]) -> list[str]:
    return [f"tests/engine/{name}" for name in tests]


def plain() -> Rows:
    """Plain decoding, and the verification of 8 rows."""
    rows: Rows = []
    for shape, batch in (*((shape, 1) for shape in TARGETS), (TARGETS[0], 8)):
        runner = engines.load_runner(
            "stories-target", shape, max_num_seqs=engines.MAX_NUM_SEQS, num_kv_blocks=512
        )
        rows += _plain(runner, shape, batch)
        del runner
        engines.free_memory()
    return rows


def _plain(runner: ModelRunner, shape: str, batch: int) -> Rows:
    core = engines.make_core(runner)
    for new in (8, engines.NEW_TOKENS):  # the first is to warm up
        for i in range(batch):
            engines.submit(core, i, engines.prompt(i), new)
        ran = engines.run(core)
    blocks = list(range(32))
    engines.fill_context(runner, 300, blocks)
    one = engines.time_step(runner, [Chunk([7], 300, blocks, 1)])
    eight = engines.time_step(runner, [Chunk([7] * (DEPTH + 1), 300, blocks, DEPTH + 1)])
    size = engines.step_bytes("stories-target", shape)
    rate = size / (1e-3 * one)
    per_token = 1e3 * ran.seconds / engines.NEW_TOKENS
    limit = VLLM_MS.get((shape, batch))
    return [
        {
            "shape": shape,
            "batch": batch,
            "ms/token, prefill included": per_token,
            "vLLM 0.25.0": limit,
            "step, 1 row, ms": one,
            "verify, 8 rows, ms": eight,
            "ratio": eight / one,
            "GB/s": rate / 1e9,
            "of copy": rate / engines.COPY_BANDWIDTH,
            "gap, median ms": 1e3 * statistics.median(ran.gaps[4:]),
        }
    ]


def gap() -> Rows:
    """Rounds that all hit, with a draft that knows the answer; sampled as requests come."""
    rows: Rows = []
    how = {"sampling": engines.SAMPLED}
    for shape in TARGETS:
        runner = engines.load_runner(
            "stories-target", shape, max_num_seqs=engines.MAX_NUM_SEQS, num_kv_blocks=512
        )
        draft = engines.PerfectDraft(DEPTH)
        core = engines.make_core(runner, draft.send, DEPTH)
        draft.core = core
        tokens = engines.prompt(1)
        engines.submit(core, 1, tokens, 500, **how)
        text = engines.run(core).tokens[1]
        core.handle(draft.up())
        for _ in range(2):  # the first is to warm up
            draft.texts[1] = tokens + text
            engines.submit(core, 1, tokens, 500, mode=Mode.SSD, **how)
            gc.collect()
            ran = engines.run(core)
        if ran.tokens[1] != text:
            raise SystemExit("the text has changed")
        forward = statistics.median(ran.forwards)
        per_round = (len(text) - 1) / len(ran.forwards)
        best = per_round / forward
        prefill = 1e-3 * _prefill_ms(runner)
        rate = (len(text) - 1) / (ran.seconds - prefill)
        rows.append(
            {
                "shape": shape,
                "rounds": len(ran.forwards),
                "tokens/round": per_round,
                "forward, ms": 1e3 * forward,
                "gap, median ms": 1e3 * statistics.median(ran.gaps[1:]),
                "gap, 95 %": 1e3 * sorted(ran.gaps[1:])[int(0.95 * len(ran.gaps[1:]))],
                "tokens/s": rate,
                "of tokens per round / forward": rate / best,
            }
        )
        del runner, core, draft
        engines.free_memory()
    return rows


def _prefill_ms(runner: ModelRunner) -> float:
    blocks = list(range(8))
    times = []
    for _ in range(4):
        begin = time.monotonic()
        logits = runner.forward([Chunk(engines.prompt(2), 0, blocks, 1)])
        if logits is not None:
            logits.argmax(dim=-1).tolist()
        times.append(time.monotonic() - begin)
    return 1e3 * min(times)


def prefill() -> Rows:
    """512 tokens of a prompt, 8B: what lies between the products in torch, compiled by it, fused by
    hand. The first compiled forward is timed, too: in a second run it is a warm start."""
    runner = engines.load_runner("stories-target", TARGETS[0])
    model, rows = runner.model, runner.options.max_forward_tokens
    fused, norm = model.ops, model.norm
    plain = TorchOps(model.rope, norm, model.num_heads, model.num_kv_heads)
    # 2 for each weight of 2 bytes; no logits are asked for
    head = model.weights.head.numel() * 2
    flops = rows * (engines.step_bytes("stories-target", TARGETS[0]) - head)
    results: Rows = []
    for name, ops, each_norm in (
        ("torch", plain, norm),
        ("torch.compile", _compiled(plain), torch.compile(norm)),
        ("fused by hand", fused, norm),
    ):
        model.ops, model.norm = ops, each_norm
        first, ms = _forward_ms(runner, rows)
        results.append(
            {
                "between products": name,
                "first, ms": first,
                "ms": ms,
                "tokens/s": 1e3 * rows / ms,
                "TFLOP/s": flops / (1e9 * ms),
            }
        )
    return results


def _compiled(ops: TorchOps) -> TorchOps:
    made: Any = TorchOps(ops._rope, ops._norm, ops._heads, ops._kv_heads)
    made.rotate_and_write = torch.compile(ops.rotate_and_write)
    made.gate = torch.compile(ops.gate)
    compiled: TorchOps = made
    return compiled


def _forward_ms(runner: ModelRunner, rows: int) -> tuple[float, float]:
    """The first forward, and the median of those after it."""
    blocks, times = list(range(rows // engines.BLOCK)), []
    for _ in range(15):
        begin = time.monotonic()
        runner.forward([Chunk([5] * rows, 0, blocks, 0)])
        torch.cuda.synchronize()
        times.append(1e3 * (time.monotonic() - begin))
    return times[0], statistics.median(times[3:])


def tree() -> Rows:
    """One depth of a draft's tree: from the embedding to ranked tokens, 24 branches."""
    rows: Rows = []
    for shape, limit in DRAFTS.items():
        runner = engines.load_runner(
            "stories-draft",
            shape,
            exact=False,
            branches=24,
            step_rows=DEPTH,
            ranks=17,
            max_tail=24 * 8,
            max_model_len=9216,
        )
        short = 0.0
        for context in (1000, 8000):
            blocks = list(range(context // engines.BLOCK + 2))
            engines.fill_context(runner, context, blocks)
            part = engines.tree_rows(context, 24, 4, blocks, 9216 // engines.BLOCK)
            greedy = engines.time_step(runner, [part])
            sampled = engines.time_step(runner, [part], engines.SAMPLED)
            short = short or sampled
            spec = runner.kv.spec
            keys = 2 * spec.num_layers * context * spec.num_kv_heads * spec.head_dim * 2
            size = engines.step_bytes("stories-draft", shape) + keys
            rows.append(
                {
                    "draft": shape,
                    "context": context,
                    "T = 0, ms": greedy,
                    "T = 0.7, top-p 0.9, top-k 20, ms": sampled,
                    "limit": limit if context == 1000 else 1.5 * limit,
                    "MB read": size / 1e6,
                    "of copy": size / (1e-3 * sampled) / engines.COPY_BANDWIDTH,
                    "against context 1000": sampled / short,
                }
            )
        del runner
        engines.free_memory()
    return rows


def growth() -> Rows:
    """How cost grows with batch and context: rounds of 6 rows each, 8B."""
    rows: Rows = []
    for batch in (1, 2, 4, 8, 16):
        runner = engines.load_runner(
            "stories-target",
            TARGETS[0],
            max_num_seqs=batch,
            step_rows=6,
            max_model_len=33_000,
            max_forward_tokens=2048,
        )
        width = 33_000 // engines.BLOCK + 1
        for context in (1000, 8000, 32_000):
            tables = [list(range(i * width, (i + 1) * width)) for i in range(batch)]
            for table in tables:
                engines.fill_context(runner, context, table)
            parts = [Chunk([7] * 6, context, table, 6) for table in tables]
            ms = engines.time_step(runner, parts, repeats=25)
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "ms/round": ms,
                    "plain tokens/s": 1e3 * batch / ms,
                    "tokens/s at 4 a round": 4e3 * batch / ms,
                    "memory, GiB": torch.cuda.memory_reserved() / 2**30,
                }
            )
        del runner
        engines.free_memory()
    return rows


def against_transformers(num_prompts: int) -> Rows:
    """transformers' generate on the same weights and prompts: static cache, and assisted."""
    from tools.gpu.transformers_side import compare

    return compare(min(num_prompts, 6))
