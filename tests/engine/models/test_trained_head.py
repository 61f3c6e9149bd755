"""A head that tools.train writes computes, when it is served, what it computed in training."""

from functools import partial
from pathlib import Path

import torch

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import (
    default_boundaries,
    fit_to_target,
    load_head_config,
)
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, TreeRows
from tests.harness import make_runner
from tools.train.distill import plain_divergence
from tools.train.head import DECAY, first_head, head_loss, steps_of
from tools.train.head_model import Head, export_head, load_trained_head, watched, widened
from tools.train.model import load

BLOCK, ROWS, STEPS = 16, 40, 3
TARGET = resolve_model("stories-target")


def test_a_trained_head_is_the_served_one(tmp_path: Path) -> None:
    """Features are told by the served target, too."""
    torch.manual_seed(3)
    target = load(TARGET).eval()
    made = Head(target.config, (2, 4, 5))
    made.begin_as(target)
    export_head(made, tmp_path, "stories-target")
    head = load_trained_head(tmp_path, target.config)  # rounded, as it is served
    tokens = torch.randint(3, 4096, (1, ROWS + 1))
    with torch.no_grad():
        features, _ = watched(target, tokens, head.boundaries)
        theirs = head(target.model.embed_tokens(tokens[:, 1:]), features[:, :-1], STEPS)

    serving = make_runner(TARGET, num_blocks=160)
    config = fit_to_target(load_head_config(tmp_path), serving.config, "stories-target")
    assert (config.boundaries, config.verifier) == (head.boundaries, "stories-target")
    serving.watch(config.boundaries)
    serving.forward([Chunk(tokens[0].tolist(), 0, [0, 1, 2], 1)])
    told = serving.features
    assert told is not None
    assert torch.allclose(told, features[0], atol=1e-3)
    options = RunnerOptions(
        directory=tmp_path,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=256,
        max_num_seqs=2,
        max_forward_tokens=256,
        num_kv_blocks=40,
    )
    runner = HeadRunner(config, open_head(tmp_path, config, TARGET), options, 4096)
    following = tokens[0, 1:].tolist()
    first = Chunk(following, 0, [0, 1, 2], ROWS)
    given = GivenFeatures([ROWS], told[:-1])
    ours = [runner.step_with_features([first], [], given).result().logits]
    scratch = list(range(4 * BLOCK, 4 * BLOCK + STEPS * ROWS))
    for k in range(1, STEPS):
        end = k * ROWS
        tree = TreeRows(
            tokens=[*following[k:], *[0] * k],
            positions=[row + k for row in range(ROWS)],
            limits=list(range(ROWS)),
            slots=scratch[end - ROWS : end],
            context=1,
            blocks=[0, 1, 2],
            scratch=scratch[:end],
        )
        ours.append(runner.step([tree], []).result().logits)
    for k, logits in enumerate(theirs):
        assert torch.allclose(ours[k][: ROWS - k], logits[0], atol=2e-3), k


def test_training_makes_it_say_what_the_target_says() -> None:
    torch.manual_seed(0)
    target = load(TARGET).eval().requires_grad_(False)
    head = Head(target.config, (2, 4, 5))
    head.begin_as(target)
    rows = torch.randint(3, 4096, (2, 33))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = head_loss(head, target, rows, 2, 0.1)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_its_loss_is_that_of_a_draft_model_at_each_step() -> None:
    torch.manual_seed(1)
    target = load(TARGET).eval().requires_grad_(False)
    head = Head(target.config, (2, 4, 5))
    head.begin_as(target)
    rows = torch.randint(3, 4096, (2, 21))
    said, wanted = steps_of(head, target, rows, 3)
    losses = [plain_divergence(one, wanted[:, 1 + k :], 0.2) for k, one in enumerate(said)]
    weights = [DECAY**k for k in range(3)]
    expected = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert torch.allclose(head_loss(head, target, rows, 3, 0.2), torch.as_tensor(expected))


def test_more_boundaries_count_for_nothing_at_first() -> None:
    torch.manual_seed(2)
    target = load(TARGET).eval()
    head = Head(target.config, (2, 4, 5))
    wide = widened(head, (5, 2, 7, 4))
    rows = torch.randint(3, 4096, (1, 20))
    with torch.no_grad():
        few, many = (steps_of(each, target, rows, 2)[0] for each in (head, wide))
    assert all(map(partial(torch.allclose, atol=1e-4), few, many))


def test_training_goes_on_at_the_boundaries_of_the_head_it_begins_with(tmp_path: Path) -> None:
    target = load(TARGET).eval()
    begun = Head(target.config, (1, 4))
    export_head(begun, tmp_path, TARGET.name)
    same, wide = (first_head(target, each, tmp_path) for each in (None, [1, 4, 6]))
    assert same.boundaries == (1, 4)
    assert torch.allclose(same.fc.weight, begun.fc.weight, atol=1e-2)
    assert wide.boundaries == (1, 4, 6)
    assert first_head(target, None, None).boundaries == default_boundaries(8)
