"""A grown head on its grown target says what the small one says on the small target."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.expanded_weights import CONSTANT
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import HeadConfig, fit_to_target, load_head_config
from ssd_engine.checkpoints.heads.head_expansion import count_head_parameters, grow_head
from ssd_engine.checkpoints.model_config import ModelConfig, load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape, grow_config
from ssd_engine.errors import ConfigError
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank
from tests.harness import make_runner
from tests.random_heads import KINDS, make_head
from tests.random_models import make_model

BLOCK, ROWS, STEPS = 16, 40, 4
BLOCKS = [5, 2, 9, 0]
EVERYTHING = ModelShape(hidden=100, layers=9, heads=24, kv_heads=4, head_dim=32, ff=200, vocab=600)
SHAPES = {
    "hidden": ModelShape(hidden=100),
    "heads": ModelShape(heads=16),
    "head_dim": ModelShape(head_dim=32),
    "layers": ModelShape(layers=9),
    "vocab": ModelShape(hidden=65, vocab=600),
    "everything": EVERYTHING,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense, of the size that the heads were made for."""
    directory = tmp_path_factory.mktemp("target")
    make_model("llama3-untied", directory)
    return directory


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_grows_with_its_target(kind: str, tmp_path: Path, target: Path) -> None:
    make_head(KINDS[kind], tmp_path)
    tokens = text()
    small, grown = (
        chain(make_head_runner(tmp_path, target, shape), tokens[1:], watched(target, shape, tokens))
        for shape in (None, EVERYTHING)
    )
    assert_same(grown, small)


@pytest.mark.parametrize("dimension", SHAPES)
def test_every_dimension_grows_alone(dimension: str, tmp_path: Path, target: Path) -> None:
    make_head(KINDS["qwen3-all-norms"], tmp_path, head_dim=16)
    tokens, shape = text(), SHAPES[dimension]
    small, grown = (
        chain(make_head_runner(tmp_path, target, each), tokens[1:], watched(target, each, tokens))
        for each in (None, shape)
    )
    assert_same(grown, small)


def test_a_grown_target_tells_the_same_with_zeros_behind(target: Path) -> None:
    tokens, d = text(), 64
    small = watched(target, None, tokens).unflatten(-1, (3, d))
    grown = watched(target, EVERYTHING, tokens).unflatten(-1, (3, 100))
    torch.testing.assert_close(grown[..., :d], small, rtol=1e-5, atol=1e-5)
    assert (grown[..., d] == CONSTANT).all()
    assert not grown[..., d + 1 :].any()


def test_a_grown_head_costs_what_its_shape_costs(tmp_path: Path, target: Path) -> None:
    """Filler is wherever it reaches nothing; a head of all tokens has a row for each new one."""
    make_head(KINDS["llama-whole-vocabulary"], tmp_path)
    runner = make_head_runner(tmp_path, target, EVERYTHING)
    head = fitted(tmp_path, target)
    weights, layer = runner._weights, runner._weights.decoder.layers[0]
    matrices = (layer.qkv, layer.gate_up, weights.decoder.head)
    sizes = [tuple(matrix.shape) for matrix in matrices]
    assert sizes == [(24 * 32 + 2 * 4 * 32, 200), (400, 100), (600, 100)]
    assert tuple(weights.fc.shape) == (100, 300)
    assert len(runner.kv.layers) == 1
    checkpoint = open_head(tmp_path, head, target)
    grown = grow_head(head, EVERYTHING)
    assert count_head_parameters(head, checkpoint.weights) == checkpoint.weights.num_parameters
    attention = 100 * (sizes[0][0] * 2 + 24 * 32)
    mlp, norms = 3 * 100 * 200, 4 * 100
    own = 300 * 100 + 600 * 100 + attention + mlp + norms
    assert count_head_parameters(grown, checkpoint.weights) == own


def test_a_head_of_some_tokens_drafts_no_more_when_it_grows(tmp_path: Path, target: Path) -> None:
    make_head(KINDS["llama"], tmp_path)
    assert grow_head(fitted(tmp_path, target), EVERYTHING).draft_vocab_size == 200


def test_what_cannot_grow_is_refused(tmp_path: Path, target: Path) -> None:
    make_head(KINDS["llama"], tmp_path)
    head = fitted(tmp_path, target)
    with pytest.raises(ConfigError, match="only a head of its target's size can grow"):
        grow_head(replace(head, target_hidden_size=80), EVERYTHING)
    with pytest.raises(ConfigError, match="hidden=32 is less than the checkpoint's 64"):
        grow_head(head, ModelShape(hidden=32))


def test_no_growth_changes_nothing(tmp_path: Path, target: Path) -> None:
    make_head(KINDS["llama"], tmp_path)
    head = fitted(tmp_path, target)
    assert grow_head(head, ModelShape()) == head


def test_a_grown_head_fits_its_grown_target(tmp_path: Path, target: Path) -> None:
    """What a draft and a target tell each other of themselves."""
    make_head(KINDS["llama"], tmp_path)
    config: ModelConfig = grow_config(load_model_config(target), EVERYTHING)
    grown = grow_head(fitted(tmp_path, target), EVERYTHING)
    assert fit_to_target(grown, config, "target") == grown
