"""One case: a fault of one process while streams are half way, and what it has cost."""

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf

from tools.faults.fleet import HASTY, PLACES, Fleet, Hit, Place
from tools.faults.streams import Heard, Stream, Verdict, begin, finish, judge, requests
from tools.faults.table import Row
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
        if number is signal.SIGSTOP:
            _let_stand(streams, place)
            hit.go_on()
        with ThreadPoolExecutor(1) as pool:
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


def _let_stand(streams: list[Stream], place: Place) -> None:
    """Until streams are over; a gateway, which its streams have no way around, for a while."""
    if place.is_gateway:
        time.sleep(STOPPED_SECONDS)
    else:
        finish(streams)


def cases(faults: Sequence[str], processes: Sequence[str]) -> Iterator[Case]:
    for fault in faults:
        yield from ((fault, place) for place in PLACES if name_of(place) in processes)
    if "terminate" in faults and "gateway" in processes:
        yield "terminate", Place(HASTY)


def name_of(place: Place) -> str:
    return str(place).replace(" ", "-")
