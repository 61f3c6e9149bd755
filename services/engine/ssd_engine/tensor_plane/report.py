"""How the ends of planes are told of."""

from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.receiving_end import ReceivingEnd
from ssd_engine.tensor_plane.sender import Sender


def report_of(end: Sender | ReceivingEnd) -> PlaneReport:
    if isinstance(end, Sender):
        rows, size, dropped = end.sent_rows, end.sent_bytes, end.dropped
    else:
        rows, dropped = end.received, end.discarded
        size = rows * end.stream.row_bytes
    return PlaneReport(end.stream.name, end.kind.value, end.state.value, rows, size, dropped)
