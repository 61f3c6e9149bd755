"""The target's end of a link's tensor plane."""

import logging

import torch

from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.plane import go_to_draft
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_target.config import EngineOptions
from ssd_target.records.engine_records import DraftLinkUp

log = logging.getLogger(__name__)


class PlaneReceiverOpener:
    def __init__(self, options: EngineOptions) -> None:
        self._stream = draft_distributions(options.model.vocab_size, options.speculation.depth)
        self._device = torch.device(options.runner.device)

    def __call__(self, up: DraftLinkUp, plane: Plane) -> Receiver | None:
        """A receiver on its way to the endpoint; None for an answer that does not fit."""
        answer = plane.answer
        try:
            stream = self._stream.agreed_with([answer.stream])
            return Receiver(
                go_to_draft(answer, up.epoch, stream, device=self._device, dial_host=up.host)
            )
        except (ValueError, OSError) as error:
            log.warning("no tensor plane with %s: %s", up.host, error)
            return None
