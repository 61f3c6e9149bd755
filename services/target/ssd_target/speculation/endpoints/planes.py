"""The target's ends of a link's tensor planes."""

import logging

import torch

from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.plane import AgreedPlane, go_to_draft
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.streams import RowsStream
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from ssd_serving.config import is_loopback
from ssd_target.config import EngineOptions
from ssd_target.records.engine_records import DraftLinkUp

log = logging.getLogger(__name__)


def open_plane(options: EngineOptions, up: DraftLinkUp, plane: Plane) -> Receiver | None:
    """A receiver on its way to the endpoint; None for an answer that does not fit."""
    depth = min(options.speculation.depth, up.max_depth)
    joined = _join(options, up, plane, draft_distributions(options.model.vocab_size, depth))
    return None if joined is None else Receiver(joined)


def open_features(options: EngineOptions, up: DraftLinkUp, plane: Plane) -> Sender | None:
    """A sender on its way to an endpoint that reads features."""
    if up.features is None:
        return None
    joined = _join(options, up, plane, told_features(up.features.needs))
    return None if joined is None else Sender(joined)


def _join(
    options: EngineOptions, up: DraftLinkUp, plane: Plane, stream: RowsStream
) -> AgreedPlane | None:
    answer = plane.answer
    device = torch.device(options.runner.device)
    try:
        _check_kind(options, up, answer.kind)
        stream.agreed_with([answer.stream])  # the ends check that it has as many rows, too
        joined = go_to_draft(answer, up.epoch, stream, device=device, dial_host=up.host)
    except (ValueError, OSError) as error:
        log.warning("no tensor plane with %s: %s", up.host, error)
        return None
    kind, about = answer.kind.value, {"link": up.link}
    log.info("link to %s: %s go by %s", up.host, stream.name, kind, extra=about)
    return joined


def _check_kind(options: EngineOptions, up: DraftLinkUp, kind: PlaneKind) -> None:
    """An endpoint answers with a kind that it was offered. Who has given a link TLS may think that
    all of it is encrypted."""
    if kind is PlaneKind.NCCL and not up.trusted:
        raise ValueError("NCCL believes its peer: --trust-draft allows it")
    if kind not in options.plane_kinds:
        raise ValueError(f"--plane-kind does not allow {kind.value}")
    crosses = kind is not PlaneKind.SHARED_MEMORY and not is_loopback(up.host)
    if options.hides_rows and crosses:
        raise ValueError(
            f"{kind.value} is clear text, and the link has TLS: keep both on one host, or give "
            "them a network of their own and say --insecure-plane"
        )
