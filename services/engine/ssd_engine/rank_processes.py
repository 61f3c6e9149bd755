"""The processes of ranks: what each is started with, and where it stands. No torch here."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from ssd_engine.config import ModelConfig
from ssd_engine.processes import ignore_terminal_signals
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.step_channel import StepReader

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Place:
    """Where ranks stand: ``here`` of ``size``, from ``first`` on, are on this node."""

    size: int
    first: int
    here: int
    host: str | None = None  # this node's address among several; None: there is one node

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.here)


@dataclass(frozen=True)
class RankStart:
    """What every rank's process of a node is started with."""

    config: ModelConfig
    options: RunnerOptions
    place: Place
    role: str
    log_level: str
    log_format: str = "text"


# Where ranks find each other: the port of a store on loopback, or a pipe to the node's process.
StoreLink = int | Connection
READY = b"ready"  # what a rank says on its pipe, once, when it has its weights


def start_ranks(
    start: RankStart, readers: Sequence[StepReader], stores: Sequence[StoreLink]
) -> list[BaseProcess]:
    """The last ranks of a node, one for each reader; on the leader, rank 0 is there already."""
    ranks = start.place.ranks[-len(readers) :]
    processes: list[BaseProcess] = []
    for rank, reader, store in zip(ranks, readers, stores, strict=True):
        process = _spawn.Process(
            target=_enter, args=(rank, start, reader, store), name=f"rank {rank}", daemon=True
        )
        process.start()
        processes.append(process)
    return processes


def _enter(rank: int, start: RankStart, steps: StepReader, store: StoreLink) -> None:
    ignore_terminal_signals()
    from ssd_engine.ranks import rank_main

    rank_main(rank, start, steps, store)
