"""Settings that every test shares."""

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.scale import FULL
from tests.side_by_side import place_in_order, scheduler
from tests.tools import check_tools, skipped_tools
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.processes import TargetProcess, TracedPair

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


@pytest.fixture(scope="session")
def traced_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator["TracedPair"]:
    """A patient target that knows all modes, and the draft it is linked to; both keep traces."""
    from tests.processes import PATIENT, draft, link_states, target

    folder = tmp_path_factory.mktemp("traced")
    traced = ("--trace-events", "50000")
    with draft(folder / "draft", *traced, ready=False) as drafting:
        linked = ("--draft", drafting.address, "--draft-model", "stories-draft", *PATIENT)
        with target(folder / "target", *traced, *linked) as serving:
            wait_until(lambda: link_states(serving) == ["up"], serving.log)
            yield serving, drafting


@pytest.fixture(scope="session")
def lone_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator["TargetProcess"]:
    """A target as it comes, without a draft."""
    from tests.processes import target

    with target(tmp_path_factory.mktemp("lone"), "--metrics-listen", "127.0.0.1:0") as process:
        yield process


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
