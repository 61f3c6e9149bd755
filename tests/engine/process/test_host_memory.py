"""How much memory this machine can still give."""

import builtins
import os
from typing import Any

import pytest

from ssd_engine.process.host_memory import available_memory


@pytest.mark.parametrize("has_proc", [True, False])
def test_there_is_memory_left_but_not_more_than_there_is(
    has_proc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None:
        raise FileNotFoundError

    if not has_proc:
        monkeypatch.setattr(builtins, "open", nothing)
    available = available_memory()
    monkeypatch.undo()
    assert 1 << 24 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
