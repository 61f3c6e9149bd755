"""docs/testing.md: what the tests of each promise cost, in two columns of its tables."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.suite.tiers import TIERS, tier_of

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs/testing.md"
NODE = re.compile(r"`((?:\w+/)+test_\w+\.py(?:::\w+)*)`")
HEAD = " | test | tier | s |"


def tier(nodes: list[str]) -> str:
    """The dearest of these tests'."""
    return TIERS[max(TIERS.index(tier_of(TESTS / node.split("::")[0])) for node in nodes)]


def filled(page: str, seconds: Mapping[str, float]) -> str:
    """The page with what was measured: seconds by a test's name, as pytest writes it."""
    lines = page.splitlines()
    inside = False
    for number, line in enumerate(lines):
        if line.endswith(HEAD):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and (nodes := NODE.findall(line)):
            promise, tests, *_ = line.removeprefix("| ").split(" | ")
            took = sum(time for test, time in seconds.items() if _is_one_of(test, nodes))
            cells = (promise, tests.removesuffix(" |"), tier(nodes), f"{took:.2f}")
            lines[number] = f"| {' | '.join(cells)} |"
    return "\n".join(lines) + "\n"


def _is_one_of(test: str, nodes: list[str]) -> bool:
    name = test.removeprefix("tests/").split("[")[0]
    return any(name == node or name.startswith(f"{node}::") for node in nodes)


def write(seconds: Mapping[str, float]) -> None:
    PAGE.write_text(filled(PAGE.read_text(), seconds))
