"""How the ends of planes are told of."""

from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.receiving_end import ReceivingEnd
from ssd_engine.tensor_plane.sender import Sender


def report_of(end: Sender | ReceivingEnd) -> PlaneReport:
    if isinstance(end, Sender):
        rows, dropped = end.sent_rows, end.dropped
    else:
        rows, dropped = end.received, end.discarded
    stream = end.stream
    size = rows * stream.row_bytes
    return PlaneReport(stream.name, end.kind.value, end.state.value, rows, size, dropped)
