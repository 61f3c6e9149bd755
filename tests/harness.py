"""The engine without processes: for tests that are about models, schedules and sampling."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.models.tensor_parallel import SingleRank, TensorParallel
from ssd_engine.sampling.params import Logprobs, SamplingParams
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.engine.core import EngineCore
from ssd_target.records.engine_records import Cancel, Submit
from ssd_target.records.speculation_options import SpeculationOptions, SpeculationRequest
from ssd_target.records.speculation_stats import SpeculationStats
from ssd_target.speculation.coordinator import SpeculationCoordinator

GREEDY = SamplingParams(seed=0, temperature=0.0)
BLOCK = 16


@dataclass
class Request:
    prompt: list[int]
    sampling: SamplingParams = GREEDY
    max_tokens: int = 32
    stop_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    generated: list[int] = field(default_factory=list)
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    cancel_after: int | None = None  # tokens
    speculation: SpeculationRequest = field(default_factory=SpeculationRequest)


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of all tokens but the first
    cached_tokens: int = 0
    finished: bool = False
    cancelled: bool = False
    speculation: SpeculationStats | None = None


def make_runner(
    directory: Path,
    num_blocks: int | None = 512,
    max_num_seqs: int = 64,
    dtype: str = "float32",
    device: str = "cpu",
    tp: TensorParallel | None = None,
    kernels: str = "auto",
) -> ModelRunner:
    """``kernels``: "torch" leaves the weights as kernels of a GPU read them."""
    config = load_model_config(directory)
    options = RunnerOptions(
        directory=directory,
        dtype=dtype,
        device=device,
        block_size=BLOCK,
        max_model_len=config.max_position_embeddings,
        max_num_seqs=max_num_seqs,
        max_forward_tokens=4096,
        num_kv_blocks=num_blocks,
        kernels=kernels,
    )
    return ModelRunner(config, options, tp or SingleRank())


def make_core(
    runner: ModelRunner,
    token_bytes: list[bytes] | None = None,
    max_num_seqs: int = 64,
    prefill_chunk: int = 128,
    speculator: SpeculationCoordinator | None = None,
) -> EngineCore:
    """A fresh engine, with empty caches, over weights that were loaded before."""
    table = token_bytes or [b""] * runner.config.vocab_size
    plain = SpeculationCoordinator(SpeculationOptions(), runner.config.vocab_size)
    return EngineCore(runner, table, BLOCK, max_num_seqs, prefill_chunk, speculator or plain)


def run(core: EngineCore, requests: list[Request], stagger: int = 0) -> list[Result]:
    """Submit (one each ``stagger`` steps, or all at once) and step until all have ended."""
    results = [Result() for _ in requests]
    pending = list(enumerate(requests))
    step = 0
    while pending or core.has_work:
        while pending and (not stagger or step % stagger == 0):
            index, request = pending.pop(0)
            core.handle(submit(index, request))
            if stagger:
                break
        _collect(core, requests, results)
        core.check_integrity()
        step += 1
    return results


def submit(index: int, request: Request) -> Submit:
    return Submit(
        index,
        pack_tokens(request.prompt),
        pack_tokens(request.generated),
        request.sampling,
        StopRules(request.max_tokens, request.stop_ids, request.strings),
        request.num_logprobs,
        request.speculation,
        prompt_logprobs=request.prompt_logprobs,
    )


def unpack_scores(scores: bytes, top_n: int) -> list[Logprobs]:
    lines = np.frombuffer(scores, dtype=np.int32).reshape(-1, 1 + 2 * top_n)
    return [ReportedLogprobs(lines).logprobs(row, top_n) for row in range(len(lines))]


def _collect(core: EngineCore, requests: list[Request], results: list[Result]) -> None:
    for delta in core.step().deltas:
        result = results[delta.sequence]
        result.tokens += delta.tokens
        result.logprobs += delta.logprobs or []
        if delta.prompt_scores:
            assert not result.tokens
            top_n = requests[delta.sequence].prompt_logprobs or 0
            result.prompt_logprobs += unpack_scores(delta.prompt_scores, top_n)
        result.cached_tokens = delta.cached_tokens
        result.finished = delta.finished
        result.speculation = delta.speculation
        limit = requests[delta.sequence].cancel_after
        if limit is not None and len(result.tokens) >= limit and not result.finished:
            result.cancelled = True
            core.handle(Cancel(delta.sequence))
