"""Heads against their oracle: the speculators package on the same weights, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import load_head_config
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, TreeRows
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model

BLOCK = 16
ROWS = 45
STEPS = 4  # the first one, and recurrent ones


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose embedding heads use."""
    directory = tmp_path_factory.mktemp("target")
    make_model("llama3-untied", directory)
    return directory


def make_head_runner(directory: Path, target: Path, kernels: str = "auto") -> HeadRunner:
    head = load_head_config(directory)
    options = RunnerOptions(
        directory=directory,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=512,
        max_num_seqs=4,
        max_forward_tokens=256,
        num_kv_blocks=64,
        kernels=kernels,
    )
    return HeadRunner(head, open_head(directory, head, target), options, SHAPE["vocab_size"])


def _theirs(oracle: Any, embedding: Tensor, tokens: Tensor, features: Tensor) -> list[Tensor]:
    """The numbers that it drafts at each row, for the first step and the recurrent ones."""
    oracle.embed_tokens.weight.data.copy_(embedding)
    with torch.no_grad():
        drafted: list[Tensor] = oracle(
            hidden_states=features[None],
            input_ids=tokens[None],
            document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
            position_ids=torch.arange(len(tokens))[None],
            ttt_steps=STEPS,
        )
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_and_the_recurrent_steps_draft_what_speculators_does(
    kind: str, tmp_path: Path, target: Path
) -> None:
    oracle = make_head(KINDS[kind], tmp_path)
    runner = make_head_runner(tmp_path, target)
    tokens = torch.randint(SHAPE["vocab_size"], (ROWS,))
    features = torch.randn(ROWS, 3 * SHAPE["hidden_size"])
    theirs = _theirs(oracle, runner.model.weights.embedding, tokens, features)

    blocks = list(range(-(-ROWS // BLOCK)))
    chunk = Chunk(tokens.tolist(), 0, blocks, ROWS)
    first = runner.step_with_features([chunk], [], GivenFeatures([ROWS], features))
    ours = [first.result().logits.argmax(-1)]
    scratch = [(len(blocks) + 1) * BLOCK + i for i in range(ROWS * STEPS)]
    for step in range(1, STEPS):
        end = ROWS * step
        after = [*tokens[step:].tolist(), *[0] * step]
        tree = TreeRows(
            tokens=after,
            positions=[step + row for row in range(ROWS)],
            limits=list(range(ROWS)),
            slots=scratch[end - ROWS : end],
            context=1,
            blocks=blocks,
            scratch=scratch[:end],
        )
        ours.append(runner.step([tree], []).result().logits.argmax(-1))
    for step, (drafted, expected) in enumerate(zip(ours, theirs, strict=True)):
        numbers = expected[0]
        wanted = numbers if oracle.d2t is None else numbers + oracle.d2t[numbers]
        valid = ROWS - step
        assert drafted[:valid].tolist() == wanted[:valid].tolist(), f"step {step}"
