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


def open_plane(options: EngineOptions, up: DraftLinkUp, plane: Plane) -> Receiver | None:
    """A receiver on its way to the endpoint; None for an answer that does not fit."""
    answer, depth = plane.answer, min(options.speculation.depth, up.max_depth)
    ours = draft_distributions(options.model.vocab_size, depth)
    device = torch.device(options.runner.device)
    try:
        ours.agreed_with([answer.stream])  # the ends check that it has as many rows, too
        return Receiver(go_to_draft(answer, up.epoch, ours, device=device, dial_host=up.host))
    except (ValueError, OSError) as error:
        log.warning("no tensor plane with %s: %s", up.host, error)
        return None
