"""Starts the processes of ranks. No torch here."""

from collections.abc import Sequence

from ssd_engine.parallel.ranks.rank_start import RankStart, StoreLink
from ssd_engine.parallel.ranks.step_channel import StepReader
from ssd_engine.process.fork_server import ForkedProcess, ForkServer


def start_ranks(
    forks: ForkServer,
    start: RankStart,
    readers: Sequence[StepReader],
    stores: Sequence[StoreLink],
) -> list[ForkedProcess]:
    """The last ranks of a node, one for each reader; on the leader, rank 0 is there already."""
    ranks = start.place.ranks[-len(readers) :]
    return [
        forks.start(f"rank {rank}", _enter, rank, start, reader, store)
        for rank, reader, store in zip(ranks, readers, stores, strict=True)
    ]


def _enter(rank: int, start: RankStart, steps: StepReader, store: StoreLink) -> None:
    from ssd_engine.parallel.ranks.rank_main import rank_main

    rank_main(rank, start, steps, store)
