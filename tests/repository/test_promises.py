"""docs/testing.md names the test of every promise, and all that only ``make test-full`` runs."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/testing.md").read_text()
PROMISES, FULL_RUN = PAGE.split("## What only `make test-full` runs")
NODE = re.compile(r"`((?:\w+/)+test_\w+\.py(?:::\w+)*)`")


def nodes_in(file: str) -> dict[str, bool]:
    """Names as pytest writes them, and whether the full run alone has them."""
    found = {}

    def walk(nodes: list[ast.stmt], prefix: str, full: bool) -> None:
        for node in nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith(("Test", "test")):
                name = f"{prefix}::{node.name}"
                marked = full or any(
                    ast.unparse(mark) == "pytest.mark.full" for mark in node.decorator_list
                )
                found[name] = marked
                if isinstance(node, ast.ClassDef):
                    walk(node.body, name, marked)

    body = ast.parse((TESTS / file).read_text()).body
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    whole = any(mark.startswith("pytestmark = ") and "mark.full" in mark for mark in marks)
    found[file] = whole
    walk(body, file, whole)
    return found


@pytest.mark.parametrize("node", sorted(set(NODE.findall(PROMISES))))
def test_a_promise_is_held_by_a_test_of_every_run(node: str) -> None:
    nodes = nodes_in(node.split("::")[0])
    assert node in nodes, f"docs/testing.md names {node}, which is not there"
    below = [full for name, full in nodes.items() if name == node or name.startswith(f"{node}::")]
    assert not all(below), f"{node} is part of make test-full alone"


def test_what_only_the_full_run_has_is_listed() -> None:
    files = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]
    marked = {
        name
        for file in files
        for name, full in nodes_in(file).items()
        if full and not nodes_in(file).get(name.rpartition("::")[0], False)
    }
    named = [line.split(" | ")[0] for line in FULL_RUN.splitlines() if line.startswith("| ")]
    assert set(NODE.findall("\n".join(named))) == marked


def test_no_promise_is_without_a_test() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and "::" not in line]
    tables = [line for line in rows if NODE.search(line) is None]
    assert len(tables) == 8, tables  # the heads of the tables, and the commands
