"""The modules of the project, what they import, and the packages that they belong to."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class Module:
    """What is in a file: names that it imports, as `module` or `module.name`, and classes that are
    not private to it."""

    imports: frozenset[str]
    classes: frozenset[str]

    def imports_any(self, *packages: str) -> bool:
        return any(each.partition(".")[0] in packages for each in self.imports)


@cache
def modules() -> Mapping[str, Path]:
    found = {}
    for name, source in SOURCES.items():
        for file in (source / name).rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def parsed(module: str) -> Module:
    nodes = list(ast.walk(ast.parse(modules()[module].read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    of_modules = [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    ]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    public = frozenset(name for name in classes if not name.startswith("_"))
    return Module(frozenset(plain + of_modules), public)


@cache
def module_graph() -> Mapping[str, frozenset[str]]:
    known = modules().keys()
    names = {
        name: {each if each in known else each.rpartition(".")[0] for each in parsed(name).imports}
        for name in known
    }
    return {name: frozenset(others & known - {name}) for name, others in names.items()}


def below(module: str) -> set[str]:
    """The module, and what it imports through others."""
    ahead, seen = [module], set()
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += module_graph()[name]
    return seen


def layers(text: str) -> list[list[str]]:
    """The packages of the table in docs/architecture.md, line by line."""
    section = text.partition("## Packages")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `ssd_")]
    return [re.findall(r"`(ssd_[\w.]+)`", line.split("|")[1]) for line in lines]


def package_of(module: str, packages: list[str]) -> str:
    """The longest name in the table that a module lies in."""
    return max((each for each in packages if f"{module}.".startswith(f"{each}.")), key=len)
