"""Starts the processes of ranks. No torch here."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from ssd_engine.parallel.ranks.rank_start import RankStart, StoreLink
from ssd_engine.parallel.ranks.step_channel import StepReader
from ssd_engine.process.children import ignore_terminal_signals

_spawn = multiprocessing.get_context("spawn")


def start_ranks(
    start: RankStart, readers: Sequence[StepReader], stores: Sequence[StoreLink]
) -> list[BaseProcess]:
    """The last ranks of a node, one for each reader; on the leader, rank 0 is there already."""
    ranks = start.place.ranks[-len(readers) :]
    processes: list[BaseProcess] = [
        _spawn.Process(
            target=_enter, args=(rank, start, reader, store), name=f"rank {rank}", daemon=True
        )
        for rank, reader, store in zip(ranks, readers, stores, strict=True)
    ]
    for process in processes:
        process.start()
    return processes


def _enter(rank: int, start: RankStart, steps: StepReader, store: StoreLink) -> None:
    ignore_terminal_signals()
    from ssd_engine.parallel.ranks.rank_main import rank_main

    rank_main(rank, start, steps, store)
