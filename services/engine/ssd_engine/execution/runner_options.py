"""How a model is run; the same on every rank. Plain data, no torch."""

from dataclasses import dataclass
from pathlib import Path

from ssd_engine.checkpoints.model_config import DTYPES
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.errors import ConfigError

DTYPE_NAMES = DTYPES
# The fastest for the device; on a CUDA device Triton's; none but torch's own operations.
KERNELS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class RunnerOptions:
    directory: Path
    dtype: str
    device: str  # "cpu" or "cuda"
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_forward_tokens: int
    num_kv_blocks: int | None = None  # None: sized from memory
    host_bytes: int = 0  # of the host's memory that a server needs for other than KV
    told_bytes: int = 0  # likewise of the device's, or of the host's without one: a head's features
    gpu_memory_utilization: float = 0.9
    threads: int | None = None  # None: all cores but one, dealt out to the ranks
    expand_to: ModelShape | None = None  # None: the checkpoint's own
    max_tail: int = 0  # slots that the rows of a tree see beyond their context; 0: no trees
    kernels: str = "auto"  # one of KERNELS
    # On a CUDA device:
    exact: bool = True  # a row has the same bits whatever else is running; a draft's need not
    eager: bool = False  # steps are launched kernel by kernel
    step_rows: int = 0  # rows of one sequence in a step, at most; 0: no steps of few rows
    branches: int = 0  # branches of one sequence's tree
    ranks: int = 1  # best tokens of a row that a step finds
    max_path: int = 0  # guesses of a draft between what is committed and a row's own token
    kernel_cache: Path | None = None  # where compiled kernels are kept; None: in the home
    devices: tuple[int, ...] | None = None  # one for each rank of the node; None: the first ones
    self_check: bool = False  # before it serves, the model is held against plain torch

    def ranks_on(self, device: int | None) -> int:
        """How many ranks of this node share a GPU."""
        return max(1, (self.devices or ()).count(device))

    @property
    def shares_gpus(self) -> bool:
        return any(self.ranks_on(device) > 1 for device in self.devices or ())


def parse_devices(value: str | None, device: str, ranks: int) -> tuple[int, ...] | None:
    """Parse --devices: a GPU for each rank of this node. The same one twice is for debugging."""
    if value is None:
        return None
    if device != "cuda":
        raise ConfigError(f"--devices {value} names GPUs, but this service runs on a CPU")
    numbers = [each.strip() for each in value.split(",")]
    if not all(each.isdecimal() for each in numbers):
        raise ConfigError(f"--devices: numbers such as 0,1 are needed, got {value!r}")
    if len(numbers) != ranks:
        raise ConfigError(
            f"--devices {value} names {len(numbers)} GPUs for {ranks} ranks: each needs one"
        )
    return tuple(map(int, numbers))
