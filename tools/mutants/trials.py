"""A fault against the tests that run its line: those that are near it and short come first."""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.suite.tiers import reachable
from tools.mutants import probe
from tools.mutants.faults import Fault
from tools.mutants.tree import ROOT, Tree

WHOLE_SECONDS = 1800  # for all tests, to see which run which line
STAGES = (8, 40)  # recorded seconds of the tests that are tried first, and next
SLACK_SECONDS, TIMES = 60, 6  # a hang: so many times what tests take, and this
WORKERS = str((os.cpu_count() or 1) + 1)
UNKNOWN_SECONDS = 0.05


@dataclass(frozen=True)
class Trial:
    fault: Fault
    tests: int  # that run its line
    seconds: float
    red: str  # the first of them that failed, "" if none did

    def __str__(self) -> str:
        how = f"found by {self.red}" if self.red else "NOT FOUND"
        return f"{self.fault}\n    {how}; {self.tests} tests run it; {self.seconds:.0f} s"


def who_runs(
    tree: Tree, faults: Sequence[Fault], folder: Path, chosen: Sequence[str]
) -> list[list[str]]:
    """For each fault the tests that run its line, of those that pass; one run of them all."""
    for number, fault in enumerate(faults):
        if not fault.compiled:
            call = f'__import__("tools.mutants.probe", fromlist=["ran"]).ran({number})'
            tree.write(fault.module, fault.told(tree.source(fault.module), call))
    variables = {probe.FOLDER: str(folder), "SSD_MUTANTS_FAULTS": str(len(faults))}
    options = ["-p", "tools.mutants.recorder", "--workers", WORKERS, "-q", *chosen]
    code, said = tree.pytest(options, variables, WHOLE_SECONDS)
    tree.restore()
    if not (folder / "failed.json").exists():
        raise RuntimeError(f"pytest ended with {code}:\n{said[-3000:]}")
    tests = json.loads((folder / "tests.json").read_text())
    failed = set(json.loads((folder / "failed.json").read_text()))
    for test in sorted(failed):
        print(f"fails without a fault, and is left out: {test}")
    found = []
    for number, fault in enumerate(faults):
        if fault.compiled:
            run = _importing(fault.module, tests)
        else:
            run = [tests[at] for at in probe.tests_of(folder, number, len(faults))]
        found.append([test for test in run if test not in failed])
    return found


def _importing(module: Path, tests: Sequence[str]) -> list[str]:
    """What Triton compiles has no room for a probe: tests of the engine that import it."""
    files = {test.split("::")[0] for test in tests if test.startswith("tests/engine/")}
    near = {file for file in files if ROOT / module in reachable([ROOT / file])}
    return [test for test in tests if test.split("::")[0] in near]


def tried(tree: Tree, fault: Fault, tests: Sequence[str], durations: Mapping[str, float]) -> Trial:
    begin, red = time.monotonic(), ""
    tree.write(fault.module, fault.applied(tree.source(fault.module)))
    for stage, seconds in _stages(_ordered(fault, tests, durations), durations):
        named = tree.folder / "build-arguments"
        named.write_text("\n".join(stage) + "\n")
        options = ["--exitfirst", "--workers", WORKERS, "-q", "--timeout", "60", f"@{named}"]
        code, said = tree.pytest(options, {}, SLACK_SECONDS + TIMES * seconds)
        if code != 0:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
            red = failed[0] if failed else f"a run that ended with {code}: {said[-300:]!r}"
            break
    tree.restore()
    return Trial(fault, len(tests), time.monotonic() - begin, red)


def _ordered(fault: Fault, tests: Sequence[str], durations: Mapping[str, float]) -> list[str]:
    """By file: the nearest first, then the shortest."""
    parts = set(fault.module.with_suffix("").parts)
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)

    def rank(file: str) -> tuple[int, float]:
        names = set(Path(file).with_suffix("").parts) | {Path(file).stem.removeprefix("test_")}
        return -len(parts & names), sum(_seconds(test, durations) for test in files[file])

    return [test for file in sorted(files, key=rank) for test in files[file]]


def _stages(
    tests: Sequence[str], durations: Mapping[str, float]
) -> Iterator[tuple[list[str], float]]:
    """All tests, in at most three parts, and the seconds that each takes."""
    stage: list[str] = []
    seconds, limits = 0.0, list(STAGES)
    for test in tests:
        stage.append(test)
        seconds += _seconds(test, durations)
        if limits and seconds > limits[0]:
            yield stage, seconds
            stage, seconds = [], 0.0
            limits.pop(0)
    if stage:
        yield stage, seconds


def _seconds(test: str, durations: Mapping[str, float]) -> float:
    return durations.get(test, durations.get(test.split("::")[0], UNKNOWN_SECONDS))
