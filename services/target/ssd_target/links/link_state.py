"""The life of a link to a speculation endpoint. No gRPC here."""

from enum import Enum


class DraftLinkState(Enum):
    CONNECTING = "connecting"  # a stream is opened, hello is sent
    UP = "up"  # the endpoint has answered with welcome
    WAITING = "waiting"  # for the next try
    REFUSED = "refused"  # the endpoint does not fit; it is asked again, but seldom
    CLOSED = "closed"  # by this side, for good


class DraftLinkEvent(Enum):
    WELCOME = "welcome"
    FAIL = "fail"  # no connection, a broken stream, a stall, a breach of the protocol
    MISFIT = "misfit"  # FAILED_PRECONDITION
    RETRY = "retry"
    CLOSE = "close"


TRANSITIONS = {
    (DraftLinkState.CONNECTING, DraftLinkEvent.WELCOME): DraftLinkState.UP,
    (DraftLinkState.CONNECTING, DraftLinkEvent.FAIL): DraftLinkState.WAITING,
    (DraftLinkState.CONNECTING, DraftLinkEvent.MISFIT): DraftLinkState.REFUSED,
    (DraftLinkState.CONNECTING, DraftLinkEvent.CLOSE): DraftLinkState.CLOSED,
    (DraftLinkState.UP, DraftLinkEvent.FAIL): DraftLinkState.WAITING,
    (DraftLinkState.UP, DraftLinkEvent.MISFIT): DraftLinkState.REFUSED,
    (DraftLinkState.UP, DraftLinkEvent.CLOSE): DraftLinkState.CLOSED,
    (DraftLinkState.WAITING, DraftLinkEvent.RETRY): DraftLinkState.CONNECTING,
    (DraftLinkState.WAITING, DraftLinkEvent.CLOSE): DraftLinkState.CLOSED,
    (DraftLinkState.REFUSED, DraftLinkEvent.RETRY): DraftLinkState.CONNECTING,
    (DraftLinkState.REFUSED, DraftLinkEvent.CLOSE): DraftLinkState.CLOSED,
}


def transition(state: DraftLinkState, event: DraftLinkEvent) -> DraftLinkState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a {state.value} link cannot {event.value}") from None
