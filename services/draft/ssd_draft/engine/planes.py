"""The draft's ends of a link's tensor planes: what is needed to answer an offer."""

import logging
from collections.abc import Callable

import torch

from ssd_draft.config import INBOX_BYTES, DraftEngineOptions
from ssd_draft.records import TargetLinkUp
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.inbox import RowsInbox
from ssd_engine.tensor_plane.plane import AgreedPlane, await_target, local_offer
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer, choose_kind
from ssd_engine.tensor_plane.protocol.streams import RowsStream
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports.address import is_wildcard

log = logging.getLogger(__name__)


def open_plane(options: DraftEngineOptions, up: TargetLinkUp) -> tuple[Sender, Plane] | None:
    """A sender that waits for its target, and its address; None where nothing joins the two."""
    offer = up.plane
    if offer is None or options.runner is None or options.vocab_size is None:
        return None  # what is looked up has no distribution
    try:
        ours = draft_distributions(options.vocab_size, options.depth)
        joined = _join(options, up, offer, ours.agreed_with(offer.streams))
        return None if joined is None else (Sender(joined[0]), joined[1])
    except (ValueError, OSError) as error:
        log.warning("no tensor plane: %s", error)
        return None


def open_features(
    options: DraftEngineOptions,
    up: TargetLinkUp,
    needs: FeatureNeeds,
    on_rows: Callable[[], None],
) -> tuple[RowsInbox, Plane] | None:
    """The same for what a head is told."""
    if up.features is None:
        return None
    try:
        joined = _join(options, up, up.features, told_features(needs))
    except (ValueError, OSError) as error:
        log.warning("no tensor plane for features: %s", error)
        return None
    if joined is None:
        log.warning("no tensor plane for features: no kind and address joins target and draft")
        return None
    return RowsInbox(joined[0], INBOX_BYTES, on_rows), joined[1]


def _join(
    options: DraftEngineOptions, up: TargetLinkUp, offer: PlaneOffer, stream: RowsStream
) -> tuple[AgreedPlane, Plane] | None:
    device = torch.device("cpu" if options.runner is None else options.runner.device)
    able = local_offer(device, allowed=options.plane_kinds)
    kind = choose_kind(offer, able, options.plane_ports is not None)
    host = up.interface or options.listen_host
    if kind is None or is_wildcard(host):
        return None  # no kind, or no known way to the target: a plane waits on no other
    plane, answer = await_target(
        kind, up.epoch, stream, bind_host=host, device=device, ports=options.plane_ports
    )
    log.info("link %d: %s go by %s", up.link, stream.name, kind.value, extra={"link": up.link})
    return plane, Plane(0, 0, answer)
