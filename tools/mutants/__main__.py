"""Does a test notice when the code is wrong? Faults, drawn by a seed, each against its tests.

    python -m tools.mutants [--seed 1] [--faults 30] [--least 27] [--minutes 40] [--tests PATH ...]

Each fault stands in another module, at one place of its syntax tree. One run of all tests tells
which of them run that place; those are run against the fault, until one fails. Exit code 0: so many
were found, in so many minutes.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tools.mutants.faults import Fault, draw
from tools.mutants.tree import ROOT, Tree
from tools.mutants.trials import Trial, tried, who_runs


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--least", type=int, default=27, help="so many have to be found")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="of these, not of all")
    parser.add_argument("--list", action="store_true", help="print the faults, and try none")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder, "tree"))
        faults = draw(tree.folder, tree.modules(), options.faults, options.seed)
        if options.list:
            print("\n".join(map(str, faults)))
            return 0
        runs = who_runs(tree, faults, Path(folder), options.tests)
        print(f"{_minutes(begin)}: known which tests run which of {len(faults)} faults", flush=True)
        durations = json.loads((ROOT / "tests/suite/durations.json").read_text())
        trials: list[Trial] = []
        left: list[Fault] = []
        for fault, tests in sorted(zip(faults, runs, strict=True), key=lambda pair: len(pair[1])):
            if time.monotonic() - begin > options.minutes * 60:
                left.append(fault)
                continue
            trials.append(tried(tree, fault, tests, durations))
            print(trials[-1], flush=True)
    found = [trial for trial in trials if trial.red]
    print(f"{_minutes(begin)}: {len(found)} of {len(faults)} faults were found")
    for trial in trials:
        if not trial.red:
            print(f"not found: {trial.fault}")
    for fault in left:
        print(f"not tried, as time was over: {fault}")
    return 0 if len(found) >= options.least else 1


def _minutes(begin: float) -> str:
    return f"{(time.monotonic() - begin) / 60:.1f} minutes"


if __name__ == "__main__":
    sys.exit(main())
