"""The draft's end of a link's tensor plane: what is needed to answer an offer."""

import logging

import torch

from ssd_draft.config import DraftEngineOptions
from ssd_draft.records import TargetLinkUp
from ssd_engine.sampling.rejection import WIRE
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.plane import local_offer, open_sender
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer, choose_kind
from ssd_engine.tensor_plane.protocol.rows import RowsFormat
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports.address import is_wildcard

log = logging.getLogger(__name__)


class PlaneSenderOpener:
    def __init__(self, options: DraftEngineOptions) -> None:
        self._options = options

    def __call__(self, up: TargetLinkUp) -> tuple[Sender, Plane] | None:
        """A sender that waits for its target, and its address; None where nothing joins the two."""
        options, offer = self._options, up.plane
        if offer is None or options.runner is None or options.vocab_size is None:
            return None  # what is looked up has no distribution
        device = torch.device(options.runner.device)
        known = {kind.value for kind in PlaneKind}
        theirs = PlaneOffer(
            tuple(PlaneKind(kind) for kind in offer.kinds if kind in known),
            offer.host_id,
            offer.device_id,
        )
        kind = choose_kind(theirs, local_offer(device), options.plane_ports is not None)
        if kind is None:
            return None
        host = up.interface or options.listen_host
        if is_wildcard(host):
            return None  # the way to the target is not known, and a plane waits on no other
        rows = RowsFormat(options.vocab_size, WIRE, min(options.depth, up.max_depth))
        try:
            sender, answer = open_sender(
                kind,
                up.epoch,
                bind_host=host,
                rows=rows,
                device=device,
                ports=options.plane_ports,
            )
        except OSError as error:
            log.warning("no tensor plane: %s", error)
            return None
        return sender, Plane(0, 0, answer.kind.value, answer.address, answer.secret)
