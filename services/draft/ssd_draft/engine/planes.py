"""The draft's end of a link's tensor plane: what is needed to answer an offer."""

import logging

import torch

from ssd_draft.config import DraftEngineOptions
from ssd_draft.records import TargetLinkUp
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.plane import await_target, local_offer
from ssd_engine.tensor_plane.protocol.handshake import choose_kind
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports.address import is_wildcard

log = logging.getLogger(__name__)


def open_plane(options: DraftEngineOptions, up: TargetLinkUp) -> tuple[Sender, Plane] | None:
    """A sender that waits for its target, and its address; None where nothing joins the two."""
    offer = up.plane
    if offer is None or options.runner is None or options.vocab_size is None:
        return None  # what is looked up has no distribution
    device = torch.device(options.runner.device)
    kind = choose_kind(
        offer, local_offer(device, allowed=options.plane_kinds), options.plane_ports is not None
    )
    host = up.interface or options.listen_host
    if kind is None or is_wildcard(host):
        return None  # no kind, or no known way to the target: a plane waits on no other
    ours = draft_distributions(options.vocab_size, options.depth)
    try:
        plane, answer = await_target(
            kind,
            up.epoch,
            ours.agreed_with(offer.streams),
            bind_host=host,
            device=device,
            ports=options.plane_ports,
        )
    except (ValueError, OSError) as error:
        log.warning("no tensor plane: %s", error)
        return None
    return Sender(plane), Plane(0, 0, answer)
