"""Log probabilities of prompts: transformers' own, however a prompt is cut and whoever runs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_engine.execution.runner import SCORED_ROWS, ModelRunner
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.result import PendingForward, Score
from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.scoring import score_tokens
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run, submit, unpack_scores
from tests.random_models import make_model
from tests.synchronous import DrawsNothing
from tests.thread_ranks import ThreadRanks

LENGTHS = (1, 2, 17, 130, 300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> PreTrainedModel:
    return make_model("qwen3", directory)


@pytest.fixture(scope="module")
def runner(oracle: PreTrainedModel, directory: Path) -> ModelRunner:
    return make_runner(directory)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 512, (length,), generator=generator).tolist()


def assert_agree(got: Sequence[Logprobs], oracle: PreTrainedModel, prompt: list[int]) -> None:
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(got) == len(prompt) - 1
    for line, token, ours in zip(expected, prompt[1:], got, strict=False):
        assert ours.chosen == pytest.approx(line[token].item(), abs=1e-4)
        best = line.topk(len(ours.top)).values.tolist()
        assert [value for _, value in ours.top] == pytest.approx(best, abs=1e-4)
        assert [line[i].item() for i, _ in ours.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("prefill_chunk", [16, 128, 2048])
def test_they_are_those_of_transformers(
    oracle: PreTrainedModel, runner: ModelRunner, prefill_chunk: int
) -> None:
    """Alone, and in one prefill with others that ask for more, less or nothing: to the bit."""
    prompts = [make_prompt(length) for length in LENGTHS]
    scored = [
        Request(prompt, max_tokens=3, prompt_logprobs=(0, 3, 20)[i % 3])
        for i, prompt in enumerate(prompts)
    ]
    others = [Request(make_prompt(length, 1), max_tokens=3) for length in (5, 40, 200)]
    together = run(make_core(runner, prefill_chunk=prefill_chunk), [*scored, *others])
    for request, result in zip(scored, together, strict=False):
        assert_agree(result.prompt_logprobs, oracle, request.prompt)
        (alone,) = run(make_core(runner, prefill_chunk=prefill_chunk), [request])
        assert alone.prompt_logprobs == result.prompt_logprobs
        (plain,) = run(make_core(runner), [Request(request.prompt, max_tokens=3)])
        assert result.tokens == plain.tokens
    assert not any(result.prompt_logprobs for result in together[len(scored) :])


def test_two_ranks_score_together(oracle: PreTrainedModel, directory: Path) -> None:
    """Few rows at a time; the second rank has no logits, but its share in them."""
    prompt, parts, barrier = make_prompt(100), [torch.empty(0)] * 2, threading.Barrier(2)
    lines: list[Tensor] = []

    def score(logits: Tensor) -> None:
        assert len(logits) <= SCORED_ROWS
        begin = sum(map(len, lines))
        lines.append(score_tokens(logits, prompt[begin + 1 : begin + 1 + len(logits)], 5))

    def one_rank(rank: int) -> None:
        ranked = make_runner(directory, 128, tp=ThreadRanks(rank, parts, barrier))
        for begin, end in ((0, 37), (37, 99)):
            chunk = Chunk(prompt[begin:end], begin, list(range(7)), 0, end - begin)
            assert ranked.forward([chunk], score=None if rank else score) is None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one_rank, range(2)))
    assert_agree(unpack_scores(torch.cat(lines).numpy().tobytes(), 5), oracle, prompt)


@pytest.mark.parametrize("num_generated", [1, 20, 200])
def test_a_resumed_request_has_those_of_its_prompt(
    oracle: PreTrainedModel, runner: ModelRunner, num_generated: int
) -> None:
    prompt, generated = make_prompt(150), make_prompt(num_generated, 2)
    resumed = Request(prompt, generated=generated, max_tokens=num_generated + 2, prompt_logprobs=2)
    (result,) = run(make_core(runner), [resumed])
    assert_agree(result.prompt_logprobs, oracle, prompt)
    assert len(result.tokens) == 2


def test_the_prefix_cache_is_written_and_not_read(runner: ModelRunner) -> None:
    core, prompt = make_core(runner), make_prompt(100)
    asked = Request(prompt, max_tokens=2, prompt_logprobs=1)
    first, second = run(core, [asked])[0], run(core, [asked])[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert second.prompt_logprobs == first.prompt_logprobs
    (plain,) = run(core, [Request(prompt, max_tokens=2)])
    assert plain.cached_tokens == 96


@pytest.mark.parametrize("replay_rows", [0, 4], ids=["prefilled again", "replayed in steps"])
@pytest.mark.parametrize("steps", range(1, 10))
def test_a_sequence_that_is_set_aside_hears_them_once(
    runner: ModelRunner, steps: int, replay_rows: int
) -> None:
    """In the middle of its prefill, which takes five steps, and after it."""
    requests = [
        Request(make_prompt(20), max_tokens=12),
        Request(make_prompt(150), max_tokens=6, prompt_logprobs=2),
    ]
    alone = run(make_engine(runner, replay_rows), [requests[1]])[0]
    core = make_engine(runner, replay_rows)
    results = follow(core, requests, {steps: lambda: set_aside(core, 1)})
    assert core.scheduler.counters.set_aside == 1
    assert results[1].tokens == alone.tokens
    assert results[1].prompt_logprobs == alone.prompt_logprobs


def make_engine(runner: ModelRunner, replay_rows: int) -> EngineCore:
    plain = SpeculationCoordinator(SpeculationOptions(), runner.config.vocab_size)
    table = [b""] * runner.config.vocab_size
    return EngineCore(runner, table, BLOCK, 4, 2 * BLOCK, plain, replay_rows)


def set_aside(core: EngineCore, sequence_id: int) -> None:
    sequence = core.scheduler._running[sequence_id]
    core.scheduler._set_aside(sequence)
    core.speculator.set_aside(sequence)


def follow(
    core: EngineCore, requests: Sequence[Request], happens: dict[int, Callable[[], None]]
) -> list[Result]:
    """``happens``: after so many steps."""
    results, step = [Result() for _ in requests], 0
    for index, request in enumerate(requests):
        core.handle(submit(index, request))
    while core.has_work:
        for delta in core.step().deltas:
            result, top_n = results[delta.sequence], requests[delta.sequence].prompt_logprobs
            if delta.prompt_scores:
                assert not result.tokens
                result.prompt_logprobs += unpack_scores(delta.prompt_scores, top_n or 0)
            result.tokens += delta.tokens
        step += 1
        happens.get(step, lambda: None)()
        core.check_integrity()
    return results


class ScoresNonsense(DrawsNothing):
    """A runner that gives NaN to the first rows that are scored."""

    asynchronous = chains = False
    gap_seconds = 0.0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.config, self.num_blocks = runner.config, runner.num_blocks

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None], score: Score
    ) -> Tensor | None:
        def break_and_score(logits: Tensor) -> None:
            score(torch.full_like(logits, torch.nan) if parts[0].start == 0 else logits)

        return self._runner.forward(parts, launched, break_and_score)

    def step(self, *about: Any) -> PendingForward:
        return self._runner.step(*about)


@pytest.mark.parametrize("length", [20, 60])
def test_a_prompt_whose_logits_are_no_numbers_fails_alone(runner: ModelRunner, length: int) -> None:
    core = make_engine(ScoresNonsense(runner), 0)  # type: ignore[arg-type]
    core.handle(submit(0, Request(make_prompt(length), max_tokens=4, prompt_logprobs=0)))
    core.handle(submit(1, Request(make_prompt(9), max_tokens=4)))
    deltas = [delta for _ in range(12) for delta in core.step().deltas]
    (failed,) = [delta for delta in deltas if delta.sequence == 0]
    assert failed.finished
    assert "non-finite" in (failed.error or "")
    assert sum(len(delta.tokens) for delta in deltas if delta.sequence == 1) == 4
    assert not core.has_work
    core.check_integrity()
