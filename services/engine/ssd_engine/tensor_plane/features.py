"""The stream of features, which are the hidden states of a target that a head reads."""

from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream

FEATURES = "features"
SEND_BYTES = 4 << 20  # of one send, about
MOST_ROWS = 512


def told_features(needs: FeatureNeeds) -> RowsStream:
    """A row for each token that is committed; the key's number is the position of the first."""
    rows = max(1, min(MOST_ROWS, SEND_BYTES // needs.row_bytes))
    return RowsStream(FEATURES, RowsDirection.TO_DRAFT, needs.width, needs.dtype, rows)
