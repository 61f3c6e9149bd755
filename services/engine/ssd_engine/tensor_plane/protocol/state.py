"""The life of one end of a tensor plane. No torch here.

A plane never recovers: what is broken is closed, and the link makes another at its next epoch.
"""

from enum import Enum


class PlaneBroken(Exception):
    """This plane carries nothing any more; the message says why."""


class PlaneState(Enum):
    CONNECTING = "connecting"
    UP = "up"
    BROKEN = "broken"
    CLOSED = "closed"


class PlaneEvent(Enum):
    CONNECTED = "connected"
    FAILED = "failed"
    CLOSE = "close"


# The thread that connects and the owner that closes do not wait for each other, so BROKEN and
# CLOSED must take the news that comes after them. Connecting twice is the one thing that cannot be.
TRANSITIONS: dict[tuple[PlaneState, PlaneEvent], PlaneState] = {
    (PlaneState.CONNECTING, PlaneEvent.CONNECTED): PlaneState.UP,
    (PlaneState.CONNECTING, PlaneEvent.FAILED): PlaneState.BROKEN,
    (PlaneState.CONNECTING, PlaneEvent.CLOSE): PlaneState.CLOSED,
    (PlaneState.UP, PlaneEvent.FAILED): PlaneState.BROKEN,
    (PlaneState.UP, PlaneEvent.CLOSE): PlaneState.CLOSED,
    (PlaneState.BROKEN, PlaneEvent.CONNECTED): PlaneState.BROKEN,
    (PlaneState.BROKEN, PlaneEvent.FAILED): PlaneState.BROKEN,
    (PlaneState.BROKEN, PlaneEvent.CLOSE): PlaneState.CLOSED,
    (PlaneState.CLOSED, PlaneEvent.CONNECTED): PlaneState.CLOSED,
    (PlaneState.CLOSED, PlaneEvent.FAILED): PlaneState.CLOSED,
    (PlaneState.CLOSED, PlaneEvent.CLOSE): PlaneState.CLOSED,
}


def transition(state: PlaneState, event: PlaneEvent) -> PlaneState:
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise ValueError(f"{event} cannot happen in {state}")
    return following
