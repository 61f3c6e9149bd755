"""A grown head on its grown target says what the small one says on the small target."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import HeadConfig, fit_to_target, load_head_config
from ssd_engine.checkpoints.heads.head_expansion import count_head_parameters, grow_head
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape, grow_config
from ssd_engine.errors import ConfigError
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank
from tests.engine.checkpoints.test_heads import tensors_of
from tests.harness import make_runner
from tests.random_heads import KINDS, make_head

BLOCK, ROWS, STEPS = 16, 40, 4
BLOCKS = [5, 2, 9, 0]
EVERYTHING = ModelShape(hidden=100, layers=9, heads=24, kv_heads=4, head_dim=32, ff=200, vocab=600)
SHAPES = {
    "hidden": ModelShape(hidden=100),
    "heads": ModelShape(heads=16),
    "head_dim": ModelShape(head_dim=32),
    "layers": ModelShape(layers=9),
    "vocab": ModelShape(hidden=65, vocab=600),
}


def fitted(directory: Path, target: Path) -> HeadConfig:
    return fit_to_target(load_head_config(directory), load_model_config(target), "target")


def make_head_runner(directory: Path, target: Path, shape: ModelShape | None) -> HeadRunner:
    head = fitted(directory, target)
    options = RunnerOptions(
        kernels="torch",
        directory=directory,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=128,
        max_num_seqs=2,
        max_forward_tokens=128,
        num_kv_blocks=16,
        expand_to=shape,
    )
    return HeadRunner(head, open_head(directory, head, target), options, 512)


def watched(target: Path, shape: ModelShape | None, tokens: list[int]) -> Tensor:
    """Features [tokens, boundaries * hidden size], as the served target tells them."""
    small = make_runner(target, num_blocks=128)
    options = replace(small.options, expand_to=shape)
    runner = ModelRunner(load_model_config(target), options, SingleRank())
    runner.watch((1, 2, 3))
    runner.forward([Chunk(tokens, 0, [0, 1, 2], 1)])
    assert runner.features is not None
    return runner.features


def chain(runner: HeadRunner, tokens: list[int], features: Tensor) -> Iterator[Tensor]:
    """Logits of the rows that are told, in two pieces, and of a chain that goes on by itself."""
    for begin, end in ((0, 13), (13, ROWS)):
        chunk = Chunk(tokens[begin:end], begin, BLOCKS, end - begin)
        given = GivenFeatures([end - begin], features[begin:end])
        yield (logits := runner.step_with_features([chunk], [], given).result().logits)
    for i in range(STEPS):
        chunk = Chunk([int(logits[-1].argmax())], ROWS + i, BLOCKS, 1)
        yield (logits := runner.step([chunk], []).result().logits)


def assert_same(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert own.shape == other.shape
        assert torch.equal(own.isinf(), other.isinf())
        drafted = ~other.isinf()
        scale = other[drafted].abs().max().item()
        assert (own[drafted] - other[drafted]).abs().max().item() < 2e-5 * scale
        assert torch.equal(own.argmax(-1), other.argmax(-1))


def text() -> list[int]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(512, (ROWS + 1,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("kind", "dimension"),
    [*((kind, "everything") for kind in KINDS), *(("qwen3-all-norms", each) for each in SHAPES)],
)
def test_every_kind_grows_with_its_target_and_every_dimension_alone(
    kind: str, dimension: str, tmp_path: Path, target: Path
) -> None:
    make_head(KINDS[kind], tmp_path, **({} if dimension == "everything" else {"head_dim": 16}))
    tokens = text()
    small, grown = (
        chain(make_head_runner(tmp_path, target, shape), tokens[1:], watched(target, shape, tokens))
        for shape in (None, SHAPES.get(dimension, EVERYTHING))
    )
    assert_same(grown, small)


def test_a_grown_head_costs_what_its_shape_costs(tmp_path: Path, target: Path) -> None:
    """A head of all tokens has a row for each new one."""
    make_head(KINDS["llama-whole-vocabulary"], tmp_path)
    head = fitted(tmp_path, target)
    weights = make_head_runner(tmp_path, target, EVERYTHING)._weights
    (layer,) = weights.decoder.layers
    sizes = [tuple(matrix.shape) for matrix in (layer.qkv, layer.gate_up, weights.decoder.head)]
    assert sizes == [(24 * 32 + 2 * 4 * 32, 200), (400, 100), (600, 100)]
    small = open_head(tmp_path, head, target).weights
    assert count_head_parameters(head, small) == small.num_parameters
    own = sum(each.numel() for each in tensors_of(weights)) - weights.decoder.embedding.numel()
    assert count_head_parameters(grow_head(head, EVERYTHING), small) == own


def test_a_grown_head_fits_its_grown_target(tmp_path: Path, target: Path) -> None:
    """What a draft and a target tell each other of themselves; it drafts no more tokens."""
    make_head(KINDS["llama"], tmp_path)
    head = fitted(tmp_path, target)
    grown = grow_head(head, EVERYTHING)
    config = grow_config(load_model_config(target), EVERYTHING)
    assert fit_to_target(grown, config, "target") == grown
    assert grown.draft_vocab_size == head.draft_vocab_size == 200
    assert grow_head(head, ModelShape()) == head


@pytest.mark.parametrize(
    ("width", "shape", "words"),
    [
        (80, EVERYTHING, "only a head of its target's size can grow"),
        (64, ModelShape(hidden=32), "hidden=32 is less than the checkpoint's 64"),
    ],
)
def test_what_cannot_grow_is_refused(
    width: int, shape: ModelShape, words: str, tmp_path: Path, target: Path
) -> None:
    make_head(KINDS["llama"], tmp_path)
    with pytest.raises(ConfigError, match=words):
        grow_head(replace(fitted(tmp_path, target), target_hidden_size=width), shape)
