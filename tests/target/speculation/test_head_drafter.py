"""A head inside the target drafts from its hidden states, and never changes a text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.sampling.params import SamplingParams
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.head_drafter import HeadDrafter
from tests.clockwork import VOCAB, make_head, make_target
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run

DEPTH = 4
SYNC = SpeculationRequest(mode=Mode.SYNC, depth=DEPTH)


@dataclass
class Clockwork:
    runner: ModelRunner
    make_drafter: Callable[..., HeadDrafter]
    drafted: int  # tokens that the head can draft

    def run(
        self, requests: list[Request], drafter: HeadDrafter | None, chunk: int = 32, blocks: int = 0
    ) -> list[Result]:
        options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
        speculator = SpeculationCoordinator(options, VOCAB, drafter=drafter)
        core = make_core(self.runner, max_num_seqs=8, prefill_chunk=chunk, speculator=speculator)
        results = run(core, requests)
        if drafter is not None:
            drafter.check_integrity()
            assert not drafter._texts
        return results


@pytest.fixture(scope="module", params=[VOCAB, 40], ids=["all tokens", "some tokens"])
def clockwork(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Clockwork:
    folder = tmp_path_factory.mktemp("clockwork")
    make_target(folder / "target")
    make_head(folder / "head", request.param)
    runner = make_runner(folder / "target", num_blocks=256)
    config = fit_to_target(load_head_config(folder / "head"), runner.config, "target")
    runner.watch(config.boundaries or ())

    def make_drafter(max_context: int = 512, num_blocks: int = 256, chunk: int = 32) -> HeadDrafter:
        options = RunnerOptions(
            directory=folder / "head",
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            max_model_len=max_context,
            max_num_seqs=8,
            max_forward_tokens=256,
            num_kv_blocks=num_blocks,
        )
        checkpoint = open_head(folder / "head", config, folder / "target")
        heads = HeadRunner(config, checkpoint, options, VOCAB)
        return HeadDrafter(heads, BLOCK, max_context, DEPTH, chunk)

    return Clockwork(runner, make_drafter, request.param)


def requests(count: int, prompt: int, tokens: int, temperature: float) -> list[Request]:
    return [
        Request(
            [(5 * i + 11 * seed) % VOCAB for i in range(prompt + seed)],
            SamplingParams(seed=seed, temperature=temperature),
            max_tokens=tokens,
            speculation=SYNC,
        )
        for seed in range(count)
    ]


def compare(clockwork: Clockwork, asked: list[Request], drafter: HeadDrafter) -> list[Result]:
    off = SpeculationRequest(mode=Mode.OFF)
    expected = clockwork.run([replace(each, speculation=off) for each in asked], None)
    found = clockwork.run(asked, drafter)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    return found


def acceptance(results: list[Result]) -> float:
    stats = [each.speculation for each in results if each.speculation is not None]
    return sum(s.accepted_tokens for s in stats) / max(1, sum(s.drafted_tokens for s in stats))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 6])
def test_texts_are_plain_decodings_and_foreseen_tokens_are_right(
    clockwork: Clockwork, count: int, temperature: float
) -> None:
    found = compare(clockwork, requests(count, 20, 40, temperature), clockwork.make_drafter())
    rate = acceptance(found)
    if clockwork.drafted < VOCAB:
        assert 0.1 < rate < 1.0
    else:
        assert rate == 1.0 if temperature == 0.0 else rate > 0.2


def test_prompts_in_pieces_and_prefixes_that_are_cached(clockwork: Clockwork) -> None:
    """A text of the head begins after what the target took from its cache."""
    asked = requests(3, 150, 24, 0.0)
    first = compare(clockwork, asked, clockwork.make_drafter())
    found = clockwork.run([*asked, *asked], clockwork.make_drafter())
    assert [each.tokens for each in found] == 2 * [each.tokens for each in first]
    assert acceptance(found) == pytest.approx(acceptance(first), rel=0.05)


@pytest.mark.parametrize(
    ("prompt", "tokens", "count", "limits"),
    [(90, 120, 2, {"max_context": 64}), (60, 30, 6, {"max_context": 128, "num_blocks": 8})],
    ids=["beyond its context", "without room"],
)
def test_a_head_that_has_too_little_begins_again_or_does_not_draft(
    clockwork: Clockwork, prompt: int, tokens: int, count: int, limits: dict[str, int]
) -> None:
    drafter = clockwork.make_drafter(**limits)
    found = compare(clockwork, requests(count, prompt, tokens, 0.0), drafter)
    assert acceptance(found) > 0.1
    fallbacks = [each.speculation.fallbacks for each in found if each.speculation is not None]
    assert any("no room" in each for each in fallbacks) == ("num_blocks" in limits)


def test_features_that_are_kept_have_a_bound(clockwork: Clockwork) -> None:
    """In bytes, for all texts together: the longest begin again, and no text is another."""
    row_bytes = 4 * clockwork.runner.config.hidden_size * len(clockwork.runner._watched)
    asked, drafter = requests(3, 100, 60, 0.0), clockwork.make_drafter()
    drafter._max_bytes = 150 * row_bytes
    most, make_room = 0, drafter._make_room

    def watched() -> None:
        nonlocal most
        make_room()
        most = max(most, drafter._num_bytes)
        drafter.check_integrity()

    drafter._make_room = watched  # type: ignore[method-assign]
    found = compare(clockwork, asked, drafter)
    assert acceptance(found) > 0
    assert 100 * row_bytes < most <= 150 * row_bytes
    assert drafter._num_bytes == 0
