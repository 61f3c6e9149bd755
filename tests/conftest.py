"""Settings that every test shares."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.suite import dealing, forked_services, promise_table, summary, tiers, workers
from tests.suite.dealing import shared_services
from tests.suite.tools import check_tools
from tests.waiting import wait_until

if TYPE_CHECKING:
    from ssd_engine.grammar.compiler import GrammarCompiler
    from ssd_engine.text.tokenizer import Tokenizer
    from tests.processes import TargetProcess, TracedPair

# Before torch is loaded: on two busy cores a second thread costs more than it gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before numpy is: the process that collects the tests forks, and must have no threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Before jsonschema is: it would read a grammar for seconds, for a format that no schema here has.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# Before Triton is loaded: without a GPU its kernels are interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of Ctrl-C
# would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: likewise
    signal.signal(signal.SIGHUP, lambda number, frame: None)


METER = pytest.StashKey[summary.Meter]()


@shared_services
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


@shared_services
def lone_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator["TargetProcess"]:
    """A target as it comes, without a draft."""
    from tests.processes import target

    with target(tmp_path_factory.mktemp("lone"), "--metrics-listen", "127.0.0.1:0") as process:
        yield process


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """The shipped target's."""
    from ssd_engine.checkpoints.model_config import load_model_config
    from ssd_engine.checkpoints.model_store import resolve_model
    from ssd_engine.text.tokenizer import Tokenizer

    directory = resolve_model("stories-target")
    return Tokenizer(directory, load_model_config(directory))


@pytest.fixture(scope="session")
def compiler(tokenizer: "Tokenizer") -> "GrammarCompiler":
    """A compiler of grammars for the shipped target's tokens."""
    from ssd_engine.grammar.compiler import GrammarCompiler

    return GrammarCompiler(tokenizer.serialized(), len(tokenizer.token_bytes), [1])


@pytest.fixture
def as_in_the_services() -> Iterator[None]:
    """Without a library of kernels that services do not use either."""
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    check_tools(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around all others: what it says comes last
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    yield
    stats = terminalreporter.stats
    if config.option.record_durations:
        ended = (report for name in ("", "passed", "failed") for report in stats.get(name, ()))
        durations = summary.durations(ended)
        dealing.record(durations)
        promise_table.write(durations)
    terminalreporter.section("what it took")
    terminalreporter.write_line(summary.skipped(stats.get("skipped", [])))
    terminalreporter.write_line(str(config.stash[METER]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.add_tiers(items)
    left = set(tiers.left_out(items))
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return tiers.ignore(collection_path, config.option.markexpr) or None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    workers.add_options(group)
    group.addoption(
        "--record-durations", action="store_true", help=f"write {dealing.RECORDED.name} anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[METER] = summary.Meter()
    if config.option.workers and not config.option.collectonly:
        forked_services.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return workers.run_in_workers(session)
