"""The target's end of a link's tensor plane."""

import logging

import torch

from ssd_engine.sampling.rejection import WIRE
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.plane import open_receiver
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsFormat
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_target.config import EngineOptions
from ssd_target.records.engine_records import DraftLinkUp

log = logging.getLogger(__name__)


class PlaneReceiverOpener:
    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def __call__(self, up: DraftLinkUp, plane: Plane) -> Receiver | None:
        """A receiver on its way to the endpoint; None for an answer that makes no sense."""
        options = self._options
        try:
            return open_receiver(
                PlaneAnswer(PlaneKind(plane.kind), plane.address, plane.secret),
                up.epoch,
                rows=RowsFormat(
                    options.model.vocab_size, WIRE, min(options.speculation.depth, up.max_depth)
                ),
                device=torch.device(options.runner.device),
                dial_host=up.host,
            )
        except (ValueError, OSError) as error:
            log.warning("no tensor plane with %s: %s", up.host, error)
            return None
