"""What is told of one end of a plane. No torch here."""

import msgspec


class PlaneReport(msgspec.Struct, frozen=True, array_like=True):
    """The fields have the names of TensorPlaneReport's."""

    stream: str
    kind: str
    state: str
    rows: int
    bytes: int
    dropped: int
