"""Heads, stories-eagle first of all, compute in service what they did in training."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_engine.checkpoints.heads.head_config import default_boundaries, is_head, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.checkpoints.model_store import resolve_model, shipped_models
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.head_drafter import HeadDrafter
from tests.engine.execution.emulated_device import head_runner, recurrent_logits
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model
from tests.suite.scale import FULL
from tools.bench_kit import story_prompts
from tools.train.evaluate_head import (
    DEPTHS,
    acceptance_lengths,
    foresight_of_head,
    foresight_of_model,
    write_texts,
)
from tools.train.head import first_head, head_loss, steps_of
from tools.train.head_model import Head, export_head, load_trained_head, watched
from tools.train.model import load

TARGET, HEAD, DRAFT = map(resolve_model, ("stories-target", "stories-eagle", "stories-draft"))
DEPTH, VOCAB = 3, 4096
TOKENS = 48 if FULL else 24
MANY = 60 if FULL else 6  # prompts
GROWN = ModelShape(hidden=320, layers=9, heads=16, head_dim=64, ff=1100, vocab=5000)


def encoded(prompt: str) -> list[int]:
    tokenizer = Tokenizer(TARGET, load_model_config(TARGET))
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def prompts() -> list[list[int]]:
    asked = ("a shy lamb who learns to sing", "an old bear", "two friends who bake bread")
    return [encoded(f"Tell me a story about {each}.") for each in asked]


def serve(shape: ModelShape | None = None) -> list[Result]:
    """Greedy texts of a target with the head inside, in rounds of DEPTH tokens."""
    grown = replace(make_runner(TARGET).options, expand_to=shape)
    runner = ModelRunner(load_model_config(TARGET), grown, SingleRank())
    heads = head_runner(HEAD.parent, VOCAB, TARGET, HEAD.name, expand_to=shape)
    runner.watch(heads._config.boundaries or ())
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    drafter = HeadDrafter(heads, BLOCK, 512, DEPTH, 256)
    core = make_core(runner, speculator=SpeculationCoordinator(options, VOCAB, drafter=drafter))
    sync = SpeculationRequest(mode=Mode.SYNC, depth=DEPTH)
    return run(core, [Request(p, max_tokens=TOKENS, speculation=sync) for p in prompts()])


@pytest.fixture(scope="module")
def served() -> list[Result]:
    return serve()


def counts(results: list[Result]) -> list[tuple[int, int, int]]:
    """Of each text: rounds, drafted and accepted tokens."""
    stats = [each.speculation for each in results if each.speculation is not None]
    return [(each.rounds, each.drafted_tokens, each.accepted_tokens) for each in stats]


def test_it_names_its_target_which_is_shipped_too() -> None:
    assert is_head(HEAD)
    assert load_head_config(HEAD).verifier in shipped_models()
    assert (HEAD / "README.md").is_file()


def test_served_rounds_are_those_of_the_training_code(served: list[Result]) -> None:
    target = load(TARGET).eval()
    head = load_trained_head(HEAD, target.config)
    texts = list(write_texts(target, [np.array(p) for p in prompts()], 0.0, TOKENS))
    written = sorted(text.tokens[text.prompt :] for text in texts)
    assert sorted(each.tokens for each in served) == written
    ways = {"head": foresight_of_head(head, target)}
    expected = acceptance_lengths(ways, texts, VOCAB)["head"][DEPTHS.index(DEPTH)]
    tokens = sum(len(each.tokens) - 1 for each in served)
    assert tokens / sum(rounds for rounds, _, _ in counts(served)) == pytest.approx(expected)


def test_it_is_right_as_often_as_the_draft_model() -> None:
    """Over the same texts, at every depth up to 3. With 120 prompts, 3.124 tokens a round of 3 are
    beside 3.048."""
    target = load(TARGET).eval()
    ways = {
        "head": foresight_of_head(load_trained_head(HEAD, target.config), target),
        "draft": foresight_of_model(load(DRAFT).eval()),
    }
    asked = [encoded(each) for each in story_prompts(MANY, seed=0)]
    texts = list(write_texts(target, [np.array(each) for each in asked], 0.0, 48))
    lengths = acceptance_lengths(ways, texts, VOCAB)
    for depth in range(DEPTH):
        assert lengths["head"][depth] >= lengths["draft"][depth], f"at depth {depth + 1}"


def test_grown_with_its_target_it_drafts_the_same(served: list[Result]) -> None:
    grown = serve(GROWN)
    assert [each.tokens for each in grown] == [each.tokens for each in served]
    assert counts(grown) == counts(served)


# Heads that are trained

ROWS = 40


def test_a_trained_head_is_the_served_one(tmp_path: Path) -> None:
    """Features are told by the served target, too."""
    target, made = target_and_head(3)
    export_head(made, tmp_path / "head", "stories-target")
    head = load_trained_head(tmp_path / "head", target.config)  # rounded, as it is served
    tokens = torch.randint(3, VOCAB, (1, ROWS + 1))
    with torch.no_grad():
        features, _ = watched(target, tokens, head.boundaries)
        theirs = head(target.model.embed_tokens(tokens[:, 1:]), features[:, :-1], DEPTH)

    serving = make_runner(TARGET, num_blocks=160)
    runner = head_runner(tmp_path, VOCAB, TARGET)
    config = runner._config
    assert (config.boundaries, config.verifier) == (head.boundaries, "stories-target")
    serving.watch(config.boundaries or ())
    serving.forward([Chunk(tokens[0].tolist(), 0, [0, 1, 2], 1)])
    told = serving.features
    assert torch.allclose(told, features[0], atol=1e-3)
    ours = recurrent_logits(runner, tokens[0, 1:].tolist(), told[:-1], DEPTH)
    for k, logits in enumerate(theirs):
        assert torch.allclose(ours[k][: ROWS - k], logits[0], atol=2e-3), k


def target_and_head(seed: int) -> tuple[Any, Head]:
    torch.manual_seed(seed)
    target = load(TARGET).eval().requires_grad_(False)
    head = Head(target.config, (2, 4, 5))
    head.begin_as(target)
    return target, head


def test_training_makes_it_say_what_the_target_says() -> None:
    target, head = target_and_head(0)
    rows = torch.randint(3, VOCAB, (2, 33))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = head_loss(head, target, rows, 2, 0.1)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_training_goes_on_at_the_boundaries_of_the_head_it_begins_with(tmp_path: Path) -> None:
    """More of them count for nothing at first."""
    target, begun = target_and_head(2)
    export_head(begun, tmp_path, TARGET.name)
    same, wide = (first_head(target, each, tmp_path) for each in (None, [5, 2, 7, 4]))
    assert (same.boundaries, wide.boundaries) == (begun.boundaries, (5, 2, 7, 4))
    assert first_head(target, None, None).boundaries == default_boundaries(8)
    rows = torch.randint(3, VOCAB, (1, 20))
    with torch.no_grad():
        few, many = (steps_of(each, target, rows, 2)[0] for each in (same, wide))
    assert all(map(partial(torch.allclose, atol=1e-4), few, many))


# Heads of both formats, against the speculators package on the same weights, in float32

STEPS = 4  # the first one, and recurrent ones


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_and_the_recurrent_steps_draft_what_speculators_does(
    kind: str, tmp_path: Path
) -> None:
    make_model("llama3-untied", tmp_path / "target")  # heads use its embedding
    oracle = make_head(KINDS[kind], tmp_path / "head")
    runner = head_runner(tmp_path, SHAPE["vocab_size"])
    tokens = torch.randint(SHAPE["vocab_size"], (ROWS,))
    features = torch.randn(ROWS, 3 * SHAPE["hidden_size"])
    oracle.embed_tokens.weight.data.copy_(runner.model.weights.embedding)
    with torch.no_grad():  # the numbers that it drafts at each row, in each step
        theirs = oracle(
            hidden_states=features[None],
            input_ids=tokens[None],
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            position_ids=torch.arange(ROWS)[None],
            ttt_steps=STEPS,
        )
    found = recurrent_logits(runner, tokens.tolist(), features, STEPS)
    for step, (logits, (numbers, *_)) in enumerate(zip(found, theirs, strict=True)):
        wanted = numbers if oracle.d2t is None else numbers + oracle.d2t[numbers]
        assert (logits.argmax(-1) == wanted)[: ROWS - step].all(), f"step {step}"
