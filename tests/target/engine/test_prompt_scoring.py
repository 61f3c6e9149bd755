"""Log probabilities of prompts: transformers' own, however a prompt is cut and whoever runs."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_engine.execution.runner import SCORED_ROWS, ModelRunner
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.result import Score
from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.scoring import score_tokens
from ssd_target.records.engine_records import StepOutput
from tests.harness import Request, make_core, make_runner, run, submit, unpack_scores
from tests.random_models import make_model
from tests.target.engine.devices import make_engine
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
    scored = [
        Request(make_prompt(length), max_tokens=3, prompt_logprobs=(0, 3, 20)[i % 3])
        for i, length in enumerate(LENGTHS)
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
    scored = Request(make_prompt(150), max_tokens=6, prompt_logprobs=2)
    (alone,) = run(make_engine(runner, replay_rows=replay_rows), [scored])
    core = make_engine(runner, replay_rows=replay_rows)
    step, taken = core.step, itertools.count(1)

    def step_and_set_aside() -> StepOutput:
        result = step()
        if next(taken) == steps:
            sequence = core.scheduler._running[1]
            core.scheduler._set_aside(sequence)
            core.speculator.set_aside(sequence)
        return result

    core.step = step_and_set_aside  # type: ignore[method-assign]
    _, result = run(core, [Request(make_prompt(20), max_tokens=12), scored])
    assert core.scheduler.counters.set_aside == 1
    assert result.tokens == alone.tokens
    assert result.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("length", [20, 60])
def test_a_prompt_whose_logits_are_no_numbers_fails_alone(
    runner: ModelRunner, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows that are scored are NaN."""
    forward = runner.forward

    def forward_and_break(
        parts: Sequence[Part],
        launched: Callable[[], None] | None = None,
        score: Score = lambda logits: None,
    ) -> Tensor | None:
        def break_and_score(logits: Tensor) -> None:
            score(torch.full_like(logits, torch.nan) if parts[0].start == 0 else logits)

        return forward(parts, launched, break_and_score)

    monkeypatch.setattr(runner, "forward", forward_and_break)
    core = make_engine(runner, replay_rows=0)
    core.handle(submit(0, Request(make_prompt(length), max_tokens=4, prompt_logprobs=0)))
    core.handle(submit(1, Request(make_prompt(9), max_tokens=4)))
    deltas = [delta for _ in range(12) for delta in core.step().deltas]
    (failed,) = (delta for delta in deltas if delta.sequence == 0)
    assert failed.finished
    assert "non-finite" in (failed.error or "")
    assert sum(len(delta.tokens) for delta in deltas) == 4
    assert not core.has_work
    core.check_integrity()
