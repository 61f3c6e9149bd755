"""The target that heads of these tests were made for."""

from pathlib import Path

import pytest

from tests.random_models import make_model


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense, of their size."""
    directory = tmp_path_factory.mktemp("target")
    make_model("llama3-untied", directory)
    return directory
