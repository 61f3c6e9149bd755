"""A hostile target beside a real one at the draft that they share: it harms nobody but itself."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from ssd.v1 import speculation_pb2 as pb
from tests.draft.raw_target import RawTarget
from tests.draft.scripted_draft import opening
from tests.speculation.generations import Generations, Pair, is_empty, looked_up, request
from tests.suite.scale import share
from tests.waiting import wait_until

RECEIVED = "ssd_draft_frames_received_total"
FRAMES = share(1000, 200)  # of the attack, at least


def closing(sequence: int) -> pb.TargetFrame:
    return pb.TargetFrame(sequence=sequence, close=pb.Close())


def test_it_cannot_close_or_replace_what_it_guesses_the_name_of(pair: Pair) -> None:
    """Sequences of a real target are numbered from 1 on."""
    messages = [request(seed, 30) for seed in range(4)]
    plain, stop = pair.plain.of(messages), threading.Event()
    received = pair.draft.process.metrics()[RECEIVED]

    def attack() -> None:
        for first in itertools.cycle(range(1, 4000, 20)):
            if stop.is_set():
                return
            names = range(first, first + 20)
            hostile.try_send(*(opening(name) for name in names if name % 20 < 4))
            hostile.try_send(*(closing(name) for name in names))

    with (
        RawTarget(pair.draft.process) as hostile,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as at_end,
    ):
        at_end.callback(hostile.call.cancel)
        at_end.callback(stop.set)
        threads = [pool.submit(attack), pool.submit(hostile.end)]
        own = 0
        while pair.draft.process.metrics()[RECEIVED] - received - own < FRAMES:
            with Generations(pair.target, messages) as running:
                pass
            assert running.texts() == plain
            for each in running.stats():
                # The draft holds every sequence and follows its rounds, be it late or not.
                assert not each.fallbacks.keys() & {"lost", "busy", "refused"}
                assert looked_up(each) > 0.5 * each.rounds
                own += 2 * each.rounds + 2  # frames
            assert not any(thread.done() for thread in threads)
    wait_until(lambda: is_empty(pair.draft.process))
