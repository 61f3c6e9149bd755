"""A plugin of pytest: says which test runs, and writes down all tests and those that fail."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.mutants import probe

_numbers: dict[str, int] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    _numbers.update({item.nodeid: number for number, item in enumerate(items, 1)})
    folder = Path(os.environ[probe.FOLDER])
    (folder / "tests.json").write_text(json.dumps(list(_numbers)))
    probe.prepare(folder, int(os.environ["SSD_MUTANTS_FAULTS"]), len(_numbers))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    probe.begins(_numbers[item.nodeid])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [
        report.nodeid
        for name in ("failed", "error")
        for report in terminalreporter.stats.get(name, [])
    ]
    Path(os.environ[probe.FOLDER], "failed.json").write_text(json.dumps(failed))
