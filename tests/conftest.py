"""Settings that every test shares."""

import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.processes import DraftProcess, TargetProcess, draft, link_states, target
from tests.scale import FULL
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
    if not line:
        return
    terminalreporter.section("tools")
    terminalreporter.write_line(line)
    collected = os.environ.get("SSD_TEST_SKIPPED")  # of make test, which runs pytest more than once
    if collected:
        with Path(collected).open("a") as file:
            file.write(f"{line}\n")


@pytest.fixture(scope="session")
def traced_pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TargetProcess, DraftProcess]]:
    """A target that knows all modes, and the draft it is linked to; both keep traces."""
    folder = tmp_path_factory.mktemp("traced")
    traced = ("--trace-events", "50000")
    with draft(folder / "draft", *traced) as drafting:
        linked = ("--draft", drafting.address, "--draft-model", "stories-draft")
        with target(folder / "target", *traced, *linked, "--no-auto-off") as serving:
            deadline = time.monotonic() + 60
            while link_states(serving) != ["up"] and time.monotonic() < deadline:
                time.sleep(0.05)
            yield serving, drafting


# Files that take longest go first, so that no worker is left alone with one at the end.
LONG = (
    "wire/test_fuzz.py",
    "target/test_exactness.py",
    "target/test_nodes.py",
    "wire/test_version_skew.py",
    "speculation/test_exact_under_every_fault.py",
    "speculation/test_protocol_explored.py",
    "speculation/test_rejection_end_to_end.py",
    "engine/test_step_kernels.py",
    "deploy/test_observability.py",
    "client/test_client_local.py",
    "repository/test_packaging.py",
    "security/test_guarded_services.py",
    "engine/test_cuda_sources.py",
    "speculation/test_rows_of_a_batch.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path).endswith(LONG))
    if not FULL:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
