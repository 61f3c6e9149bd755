"""Kernels are compiled for a CPU once."""

import pytest

from tests.engine.kernels.emulated import Emulator


@pytest.fixture(scope="package")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))
