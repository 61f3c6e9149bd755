"""What a rank's process is started with, and where it stands. No torch here."""

from dataclasses import dataclass
from multiprocessing.connection import Connection

from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner_options import RunnerOptions


@dataclass(frozen=True)
class RankPlacement:
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
    place: RankPlacement
    role: str
    log_level: str
    log_format: str = "text"


# Where ranks find each other: the port of a store on loopback, or a pipe to the node's process.
RANK_MODULE = "ssd_engine.parallel.ranks.rank_main"  # where a rank begins
StoreLink = int | Connection
