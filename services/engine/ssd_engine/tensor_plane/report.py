"""What is told of one end of a plane."""

import msgspec

from ssd_engine.tensor_plane.receiving_end import ReceivingEnd
from ssd_engine.tensor_plane.sender import Sender


class PlaneReport(msgspec.Struct, frozen=True, array_like=True):
    """The fields have the names of TensorPlaneReport's."""

    stream: str
    kind: str
    state: str
    rows: int
    bytes: int
    dropped: int


def report_of(end: Sender | ReceivingEnd) -> PlaneReport:
    if isinstance(end, Sender):
        rows, dropped = end.sent_rows, end.dropped
    else:
        rows, dropped = end.received, end.discarded
    stream = end.stream
    size = rows * stream.row_bytes
    return PlaneReport(stream.name, end.kind.value, end.state.value, rows, size, dropped)
