"""The tensor plane of a link: the draft's distributions on their way to the target.

One direction, two processes, any of which may die at any moment. The engine loops hand rows over
and ask for them; they never wait for the plane itself. A plane that fails is broken for good, and
the link makes another at its next epoch.

    draft    sender, answer = open_sender(choose_kind(offer, ours), epoch, …)
             sender.send(key, rows)             after a Launch
    target   receiver = open_receiver(answer, epoch, …)
             receiver.expect(key, n)            before the Launch leaves
             receiver.receive(key, n, timeout)  when the forward has ended
"""

from ssd_engine.tensor_plane.handshake import (
    PlaneAnswer,
    PlaneKind,
    PlaneOffer,
    choose_kind,
    host_id,
)
from ssd_engine.tensor_plane.plane import local_offer, open_receiver, open_sender
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.rows import MakeRows, RowsFormat, RowsKey
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.state import PlaneBroken, PlaneState

__all__ = [
    "MakeRows",
    "PlaneAnswer",
    "PlaneBroken",
    "PlaneKind",
    "PlaneOffer",
    "PlaneState",
    "Receiver",
    "RowsFormat",
    "RowsKey",
    "Sender",
    "choose_kind",
    "host_id",
    "local_offer",
    "open_receiver",
    "open_sender",
]
