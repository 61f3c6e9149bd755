"""Pairs of a target and a head, made once."""

from pathlib import Path

import pytest

from tests.clockwork import VOCAB, make_head, make_target
from tests.draft.speculators.head.head_world import Pair
from tests.random_heads import KINDS
from tests.random_heads import make_head as make_random_head
from tests.random_models import make_model


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random-target")
    make_model("llama3-untied", directory)
    return directory


@pytest.fixture(scope="session")
def random_pair(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Hardly any guess is right, but it depends on all that was told."""
    directory = tmp_path_factory.mktemp("random-head")
    make_random_head(KINDS["llama-two-layers"], directory)
    return Pair(random_target, directory)


def clockwork_pair(directory: Path, drafted: int) -> Pair:
    make_target(directory / "target")
    make_head(directory / "head", drafted)
    return Pair(directory / "target", directory / "head")


@pytest.fixture(scope="session")
def clockwork(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Every greedy guess is right that goes on from what was told."""
    return clockwork_pair(tmp_path_factory.mktemp("clockwork"), VOCAB)


@pytest.fixture(scope="session")
def few_tokens(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The head knows 40 of 64 tokens."""
    return clockwork_pair(tmp_path_factory.mktemp("few-tokens"), 40)
