"""The life of a link to a speculation endpoint. No gRPC here."""

from enum import Enum


class LinkState(Enum):
    CONNECTING = "connecting"  # a stream is opened, hello is sent
    UP = "up"  # the endpoint has answered with welcome
    WAITING = "waiting"  # for the next try
    REFUSED = "refused"  # the endpoint does not fit; it is asked again, but seldom
    CLOSED = "closed"  # by this side, for good


class LinkEvent(Enum):
    WELCOME = "welcome"
    FAIL = "fail"  # no connection, a broken stream, a stall, a breach of the protocol
    MISFIT = "misfit"  # FAILED_PRECONDITION
    RETRY = "retry"
    CLOSE = "close"


TRANSITIONS = {
    (LinkState.CONNECTING, LinkEvent.WELCOME): LinkState.UP,
    (LinkState.CONNECTING, LinkEvent.FAIL): LinkState.WAITING,
    (LinkState.CONNECTING, LinkEvent.MISFIT): LinkState.REFUSED,
    (LinkState.CONNECTING, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.UP, LinkEvent.FAIL): LinkState.WAITING,
    (LinkState.UP, LinkEvent.MISFIT): LinkState.REFUSED,
    (LinkState.UP, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.WAITING, LinkEvent.RETRY): LinkState.CONNECTING,
    (LinkState.WAITING, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.REFUSED, LinkEvent.RETRY): LinkState.CONNECTING,
    (LinkState.REFUSED, LinkEvent.CLOSE): LinkState.CLOSED,
}


def transition(state: LinkState, event: LinkEvent) -> LinkState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a {state.value} link cannot {event.value}") from None
