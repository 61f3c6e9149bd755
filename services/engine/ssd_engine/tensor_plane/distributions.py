"""The stream of draft distributions, from which rejection verification judges drawn tokens."""

from ssd_engine.sampling.rejection import WIRE
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream

DISTRIBUTIONS = "draft_distributions"


def draft_distributions(vocab_size: int, depth: int) -> RowsStream:
    """A row for each token of a speculation."""
    dtype = str(WIRE).removeprefix("torch.")
    return RowsStream(DISTRIBUTIONS, RowsDirection.TO_TARGET, vocab_size, dtype, depth)
