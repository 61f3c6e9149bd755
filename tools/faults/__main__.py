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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

from tools.bench_kit import setting
from tools.faults.fleet import HASTY, PLACES, Fleet, Hit, Place
from tools.faults.streams import Heard, Stream, Verdict, begin, finish, judge, requests
from tools.faults.table import HEAD, Row, write
from tools.soak.services import SoakFailed

FAULTS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
}
# Streams cannot go on where it is their gateway that is hit.
GATEWAYS_MAY: dict[str, frozenset[Verdict]] = {
    "kill": frozenset({Verdict.CUT}),
    "stop": frozenset(),
    "terminate": frozenset({Verdict.ERROR}),
}
STOPPED_SECONDS = 15.0  # of a gateway
Case = tuple[str, Place]


class Faults:
    def __init__(self, fleet: Fleet, seed: int, most_gap: float) -> None:
        self._fleet, self._contents, self._most_gap = fleet, requests(seed), most_gap
        self._expected = self._plainly()

    def _plainly(self) -> list[Heard]:
        contents = [{**each, "speculative": False} for each in self._contents]
        heard = finish(begin(self._fleet.gateway.address, contents))
        if broken := [each for each in heard if judge(each, each) is not Verdict.EQUAL]:
            raise SoakFailed(f"{len(broken)} undisturbed streams failed: {broken[0]}")
        return heard

    def row(self, fault: str, place: Place) -> Row:
        fleet, number = self._fleet, FAULTS[fault]
        fleet.settle()
        streams = begin(fleet.gateway_of(place).address, self._contents)
        self._wait_until_half_way(streams)
        service = fleet.service_of(place)
        hit, since = Hit(service, place, number), time.monotonic()
        with ThreadPoolExecutor() as pool:
            if number is signal.SIGSTOP:
                heard = self._finish_beside_a_stopped(streams, hit, place)
                ready_after = hit.ready_again()
            else:
                ready = pool.submit(hit.ready_again)
                heard, ready_after = finish(streams), ready.result()
        return Row(
            fault,
            str(place),
            Counter(map(judge, heard, self._expected)),
            max(stream.longest_gap(since) for stream in streams),
            ready_after,
            GATEWAYS_MAY[fault] if place.is_gateway else frozenset(),
            inf if place.is_gateway else self._most_gap,
            tuple(dict.fromkeys(filter(None, (each.error or each.cut for each in heard)))),
        )

    def _finish_beside_a_stopped(
        self, streams: list[Stream], hit: Hit, place: Place
    ) -> list[Heard]:
        """It stands until they are over; a gateway, that they have no way around, for a while."""
        if place.is_gateway:
            time.sleep(STOPPED_SECONDS)
            hit.go_on()
            return finish(streams)
        heard = finish(streams)
        hit.go_on()
        return heard

    def _wait_until_half_way(self, streams: Sequence[Stream]) -> None:
        """All have begun, none is over, and half of all tokens are there."""
        half = sum(len(each.token_ids) for each in self._expected) // 2
        while True:
            come = [len(each.heard.token_ids) for each in streams]
            if not all(each.is_alive() for each in streams):
                raise SoakFailed(f"a stream was over before the fault: {come} tokens had come")
            if all(come) and sum(come) >= half:
                return
            time.sleep(0.005)


def cases(faults: Sequence[str], processes: Sequence[str]) -> Iterator[Case]:
    for fault in faults:
        yield from ((fault, place) for place in PLACES if name_of(place) in processes)
    if "terminate" in faults and "gateway" in processes:
        yield "terminate", Place(HASTY)


def name_of(place: Place) -> str:
    return str(place).replace(" ", "-")


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
