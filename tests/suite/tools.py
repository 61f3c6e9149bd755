"""Tools that are no Python packages: used where present; else a test skips by the tool's name.

``make test`` lists such skips last. With SSD_TEST_FULL=1 they are failures, and so are those for
want of a tool that SSD_TEST_NEEDS names.
"""

import os
import shutil

import pytest

from tests.suite.scale import FULL

NEEDED = os.environ.get("SSD_TEST_NEEDS", "").split(",")
PROPERTY = "needs_tool"  # of a test's report


def needs_tool(name: str, *commands: str) -> pytest.MarkDecorator:
    """For tests that run a program; ``commands``: what it may be called, where not by its name."""
    return pytest.mark.needs_tool(name, *(commands or (name,)))


def find_tool(*commands: str) -> str | None:
    return next((found for each in commands if (found := shutil.which(each))), None)


def tool(*commands: str) -> str:
    """Its path, in a test that is marked with it."""
    found = find_tool(*commands)
    if found is None:
        pytest.fail(f"{commands[0]} is not installed, and the test is not marked with needs_tool")
    return found


def check_tools(item: pytest.Item, full: bool = FULL) -> None:
    """Before a test and its fixtures."""
    for mark in item.iter_markers("needs_tool"):
        name, *commands = mark.args
        if find_tool(*commands) is None:
            give_up(item, name, full, f"none of {', '.join(commands)} is on PATH")


def give_up(item: pytest.Item, name: str, full: bool, why: str) -> None:
    """Skip for want of this tool; in full mode, or if it is needed, fail."""
    if full:
        pytest.fail(f"needs {name}: {why}; with SSD_TEST_FULL=1 nothing is skipped", pytrace=False)
    if name in NEEDED:
        pytest.fail(f"needs {name}: {why}; SSD_TEST_NEEDS names it", pytrace=False)
    item.user_properties.append((PROPERTY, name))
    pytest.skip(f"needs {name}")
