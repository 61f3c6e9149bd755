"""docs/testing.md names the test of every promise, and all that only ``make test-full`` runs."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.suite.promise_table import NODE, TESTS, tier

PAGE = (TESTS.parent / "docs/testing.md").read_text()
PROMISES, REST = PAGE.split("## What only `make test-full` runs")
FULL_RUN, WENT = REST.split("## What went, and what holds its promise")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def below(body: list[ast.stmt], prefix: str, full: bool) -> Iterator[tuple[str, bool]]:
    for node in body:
        if isinstance(node, DEFINITIONS) and node.name.startswith(("Test", "test")):
            name, marks = f"{prefix}::{node.name}", map(ast.unparse, node.decorator_list)
            marked = full or "pytest.mark.full" in marks
            yield name, marked
            yield from below(node.body, name, marked)


@cache
def nodes_in(file: str) -> dict[str, bool]:
    """Names as pytest writes them, and whether the full run alone has them."""
    text = (TESTS / file).read_text()
    whole = re.search(r"^pytestmark = .*mark\.full", text, re.MULTILINE) is not None
    return {file: whole, **dict(below(ast.parse(text).body, file, whole))}


def test_promises_are_held_by_tests_of_every_run() -> None:
    named = set(NODE.findall(PROMISES))
    known = {node: nodes_in(node.split("::")[0]) for node in named}
    assert sorted(node for node in named if node not in known[node]) == []
    part = {
        node: [full for name, full in nodes.items() if f"{name}::".startswith(f"{node}::")]
        for node, nodes in known.items()
    }
    assert sorted(node for node, full in part.items() if all(full)) == [], "of the full run alone"


def test_what_only_the_full_run_has_is_listed() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if "mark.full" in path.read_text()]
    known = [nodes_in(str(path.relative_to(TESTS))) for path in files]
    marked = {
        name
        for nodes in known
        for name, full in nodes.items()
        if full and not nodes.get(name.rpartition("::")[0], False)
    }
    named = [line.split(" | ")[0] for line in FULL_RUN.splitlines() if line.startswith("| ")]
    assert set(NODE.findall("\n".join(named))) == marked


def test_what_went_is_held_by_tests_that_there_are() -> None:
    rows = [line for line in WENT.splitlines() if line.startswith("| ")]
    named = {node for line in rows for node in NODE.findall(line.split(" | ")[1])}
    assert sorted(node for node in named if node not in nodes_in(node.split("::")[0])) == []


def test_each_promise_has_a_tier_and_what_it_takes() -> None:
    for line in PROMISES.splitlines():
        if line.startswith("| ") and (nodes := NODE.findall(line)):
            *_, named, seconds = line.strip("| ").split(" | ")
            assert named == tier(nodes), line
            assert float(seconds) >= 0, line


def test_no_promise_is_without_a_test() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and "::" not in line]
    tables = [line for line in rows if NODE.search(line) is None]
    assert len(tables) == 10, tables  # the heads of the tables, and the commands
