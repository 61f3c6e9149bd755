"""Which tests go together to a worker, and which groups come first.

A file stays together, and so do files that share services: each worker would start those for
itself. A file whose tests share nothing, and take long, is dealt out test by test. Groups that took
longest come first, by durations that ``make durations`` has recorded.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

RECORDED = Path(__file__).with_name("durations.json")
UNKNOWN_SECONDS = 0.05  # of a test that was not recorded
LONG_SECONDS = 10.0  # a file that takes longer may be dealt out in parts
OWN_SECONDS = 1.0  # a test that takes longer is recorded by itself

Function = TypeVar("Function", bound=Callable[..., Any])
_shared: set[object] = set()  # functions of fixtures


def shared_services(function: Function) -> Function:
    """A fixture whose services serve all files that ask for it."""
    _shared.add(function)
    fixture: Function = pytest.fixture(scope="session")(function)
    return fixture


@dataclass(frozen=True)
class Group:
    tests: Sequence[str]
    seconds: float


def deal(items: Sequence[pytest.Item]) -> list[Group]:
    """The longest first."""
    seconds = _read()
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    joined = _joined_files(items)
    for item in items:
        file = _file(item.nodeid)
        groups[joined.get(file, file)].append(item)
    dealt = [part for group in groups.values() for part in _parts(group, seconds)]
    return sorted(dealt, key=lambda group: -group.seconds)


def _joined_files(items: Iterable[pytest.Item]) -> dict[str, str]:
    """By file that shares services with others: one of them, the same for all."""
    joined: dict[str, str] = {}

    def root(name: str) -> str:
        while joined.setdefault(name, name) != name:
            name = joined[name]
        return name

    for item in items:
        for fixture in _fixtures(item):
            if fixture.func in _shared:
                joined[root(_file(item.nodeid))] = root(f"{fixture.baseid}: {fixture.argname}")
    return {name: root(name) for name in joined}


def _parts(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[Group]:
    times = [_seconds(item.nodeid, seconds) for item in items]
    names = [item.nodeid for item in items]
    if sum(times) < LONG_SECONDS or any(map(_shares, items)):
        return [Group(names, sum(times))]
    return [Group([name], time) for name, time in zip(names, times, strict=True)]


def _shares(item: pytest.Item) -> bool:
    """True if it has a fixture that outlives the test, and is made by the tests themselves."""
    return any(each.scope != "function" and each.baseid for each in _fixtures(item))


def _fixtures(item: pytest.Item) -> list[Any]:
    info = getattr(item, "_fixtureinfo", None)
    return [] if info is None else [each[-1] for each in info.name2fixturedefs.values() if each]


def _seconds(test: str, recorded: Mapping[str, float]) -> float:
    """Files are recorded by the mean of those of their tests that are not by themselves."""
    return recorded.get(test, recorded.get(_file(test), UNKNOWN_SECONDS))


def _read() -> dict[str, float]:
    found: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return found


def record(durations: Mapping[str, float]) -> None:
    """``durations``: of all tests of a run."""
    kept = {test: round(time, 1) for test, time in durations.items() if time > OWN_SECONDS}
    rest: dict[str, list[float]] = defaultdict(list)
    for test, time in durations.items():
        if test not in kept:
            rest[_file(test)].append(time)
    kept |= {file: round(sum(times) / len(times), 4) for file, times in rest.items()}
    RECORDED.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")


def _file(test: str) -> str:
    return test.split("::", 1)[0]
