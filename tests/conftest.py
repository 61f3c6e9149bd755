"""Settings that every test shares."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.scale import FULL
from tests.side_by_side import place_in_order, scheduler
from tests.tools import check_tools, skipped_tools

# Before torch is loaded: on two busy cores a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is loaded: without a GPU its kernels are interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of Ctrl-C
# would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: likewise
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    check_tools(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around all others: what it says comes last
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    yield
    line = skipped_tools(terminalreporter.stats.get("skipped", []))
    if line:
        terminalreporter.section("tools")
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_in_order(item.nodeid))
    if not FULL:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log)
