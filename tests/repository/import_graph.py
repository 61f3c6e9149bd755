"""The modules of the project, what they import, and the packages that they belong to."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "ssd_engine": ROOT / "services/engine",
    "ssd_serving": ROOT / "services/serving",
    "ssd_target": ROOT / "services/target",
    "ssd_draft": ROOT / "services/draft",
    "ssd_client": ROOT / "client",
    "ssd_gateway": ROOT / "services/gateway",
}
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    found = {}
    for name, source in SOURCES.items():
        for file in (source / name).rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path) -> Iterator[str]:
    """Everything that a file imports anywhere in it, as `module` or `module.name`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_graph() -> Graph:
    known = modules()
    graph: Graph = {}
    for name, file in known.items():
        asked = (each if each in known else each.rpartition(".")[0] for each in imports(file))
        graph[name] = {each for each in asked if each in known} - {name}
    return graph


def cycle_in(graph: Graph) -> list[str]:
    """One cycle, if there is any."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    for node in sorted(graph):
        if found := visit(node, []):
            return found
    return []


def layers(text: str) -> list[list[str]]:
    """The packages of the table in docs/architecture.md, line by line."""
    section = text.partition("## Packages")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `ssd_")]
    return [re.findall(r"`(ssd_[\w.]+)`", line.split("|")[1]) for line in lines]


def package_of(module: str, packages: list[str]) -> str:
    """The longest name in the table that a module lies in."""
    within = [each for each in packages if module == each or module.startswith(f"{each}.")]
    return max(within, key=len)


def class_names() -> dict[str, list[str]]:
    """Where each class is defined that is not private to its module."""
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    return found
