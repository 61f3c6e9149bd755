"""Kill, stop and terminate each process of a fleet under eight streams: what became of them?

    python -m tools.faults [--faults kill stop terminate] [--processes target-front gateway]
                           [--seed 1] [--most-gap 12] [--write docs/testing.md]

Two targets share a draft. Streams of all kinds come through a gateway, and a fault hits one process
when they are half way. Exit code 0: each had the text of plain decoding, and none stood still for
longer than the bound. Where their own gateway was hit, readers were told an error, or saw the
connection break if it was killed.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.bench_kit import setting
from tools.faults.cases import FAULTS, Case, Faults, cases, name_of
from tools.faults.fleet import PLACES, Fleet
from tools.faults.table import HEAD, Row, write
from tools.soak.services import SoakFailed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults", description=__doc__.splitlines()[0]
    )
    names = [name_of(place) for place in PLACES]
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--processes", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-gap", type=float, default=12.0, help="seconds without a token")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    chosen = list(cases(options.faults, options.processes))
    if options.write and chosen != list(cases(list(FAULTS), names)):
        parser.error("--write: the table has all faults and all processes")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # services end with it
    print(setting())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        problems = list(_lead(Fleet(Path(folder)), chosen, options, rows))
    if options.write and len(rows) == len(chosen):
        write(options.write, rows)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("faults: " + ("failed" if problems else "nothing was lost without an error"))
    return 1 if problems else 0


def _lead(
    fleet: Fleet, chosen: Sequence[Case], options: argparse.Namespace, rows: list[Row]
) -> Iterator[str]:
    """Print each row; yield what is not as it should be."""
    try:
        fleet.start()
        faults = Faults(fleet, options.seed, options.most_gap)
        print(HEAD, flush=True)
        for fault, place in chosen:
            row = faults.row(fault, place)
            print(row, flush=True)
            rows.append(row)
            yield from row.problems
        yield from _tracebacks(fleet)
    except SoakFailed as error:
        yield str(error)
    finally:
        fleet.close()
    for row in rows:
        for told in row.errors:
            print(f"{row.fault} {row.process}: {told}")


def _tracebacks(fleet: Fleet) -> Iterator[str]:
    for service in fleet.services:
        _, head, trace = service.whole_log().partition("Traceback")
        if head:
            yield f"{service.name} has a traceback in its log: {trace[:3000]}"


if __name__ == "__main__":
    sys.exit(main())
