"""Settings of the engine's tests."""

import os
from collections.abc import Iterator

import pytest

from tests.engine.kernels.interpreted import hasten


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            hasten(patch)
        yield
