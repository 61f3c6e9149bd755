"""What a test costs, by what its file imports: pure, torch, or processes.

``pytest -m pure`` imports no file of another tier, and so no torch. ``sampled`` stands beside
these: kernels that an interpreter runs, and explorations of many cases, of which ``make test`` runs
a thirtieth, the same ones each time.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.suite.scale import FULL, SHARE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    ROOT,
    *(ROOT / "services" / name for name in ("engine", "serving", "target", "draft", "gateway")),
    ROOT / "client",
    ROOT / "protos",
)
PURE, TORCH, PROCESSES = TIERS = ("pure", "torch", "processes")
STARTS_PROCESSES = {
    "subprocess",
    "multiprocessing",
    "playwright",
    "tests.processes",
    "tests.suite.forked_services.results",
    "tests.suite.forked_services.start_process",
}
IS_TORCH = {"torch", "transformers", "triton", "speculators"}
_IMPORT = re.compile(r"^(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)


@cache
def tier_of(file: Path) -> str:
    """The dearest of what is imported when the file is, and when the conftests above it are."""
    found = reachable([file, *_conftests(file)])
    if any(names & STARTS_PROCESSES for path, names in found.items() if _is_test(path)):
        return PROCESSES
    packages = {name.partition(".")[0] for names in found.values() for name in names}
    return TORCH if packages & IS_TORCH else PURE


def _is_test(file: Path) -> bool:
    """True for tests and what helps them, not for what runs them."""
    return (ROOT / "tests") in file.parents and file.parent.name != "suite"


def reachable(files: Iterable[Path]) -> dict[Path, set[str]]:
    """These files, those that they import, at their top or through others, and the names of all
    that each of them imports."""
    found: dict[Path, set[str]] = {}
    ahead = list(files)
    while ahead:
        file = ahead.pop()
        if file not in found:
            found[file] = set(_imports(file))
            ahead += [other for name in found[file] for other in _files_of(name)]
    return found


@cache
def _imports(file: Path) -> tuple[str, ...]:
    return tuple(_names(file.read_text()))


def _names(text: str) -> Iterator[str]:
    for found in _IMPORT.finditer(text):
        package, imported, module = found.groups()
        if module:
            yield module
            continue
        yield package
        for name in re.findall(r"\w+(?= as )|\w+(?=\s*[,)]|$)", imported):
            yield f"{package}.{name}"


@cache
def _files_of(module: str) -> tuple[Path, ...]:
    """The module's file and those of its packages, if they are the project's."""
    parts = module.split(".")
    for source in SOURCES:
        folder = source.joinpath(*parts)
        own = [
            each for each in (folder.with_suffix(".py"), folder / "__init__.py") if each.is_file()
        ]
        if own:
            above = (source.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts)))
            return (*own, *(each for each in above if each.is_file()))
    return ()


def _conftests(file: Path) -> list[Path]:
    return [each for folder in file.parents if (each := folder / "conftest.py").is_file()]


def ignore(path: Path, expression: str) -> bool:
    """True if ``-m`` names one tier, and what is there is of others: a folder's conftest is not
    imported then, either."""
    if expression not in TIERS:
        return False
    if path.is_dir():
        return all(ignore(each, expression) for each in path.rglob("test_*.py"))
    return path.name.startswith("test_") and tier_of(path) != expression


def add_tiers(items: Iterable[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item.path))


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """What is left out of all but the full run: tests that are marked so, and of those that are
    sampled all but a share of the cases of each function."""
    left, chosen = [], {}
    if FULL:
        return []
    for item in items:
        if item.get_closest_marker("full"):
            left.append(item)
        elif item.get_closest_marker("sampled"):
            function = item.nodeid.partition("[")[0]
            rank = zlib.crc32(item.nodeid.encode())
            chosen.setdefault(function, []).append((rank, item))
    for cases in chosen.values():
        cases.sort(key=lambda case: case[0])
        left += [item for _, item in cases[max(1, len(cases) // SHARE) :]]
    return left
