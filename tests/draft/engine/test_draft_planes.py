"""The draft's end of a tensor plane, opened as its operator said."""

import socket
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ssd_draft.config import DraftConfig
from ssd_draft.engine.planes import open_plane
from ssd_draft.front.server import _engine_options, plan_draft
from ssd_draft.records import TargetLinkUp
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind, PlaneOffer
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_engine.tensor_plane.sender import Sender

VOCABULARY = plan_draft(DraftConfig("stories-draft")).model.vocab_size
DISTRIBUTIONS = draft_distributions(VOCABULARY, 4)


def opened(
    stream: RowsStream = DISTRIBUTIONS, plane_ports: str | None = None
) -> tuple[Sender, Plane] | None:
    """The plane that joins this draft to a target on another host."""
    config = DraftConfig("stories-draft", plane_ports=plane_ports)
    kinds = (PlaneKind.SHARED_MEMORY, PlaneKind.TCP)
    offer = PlaneOffer(kinds, "another host", "", (stream,))
    options = _engine_options(config, plan_draft(config))
    return open_plane(options, TargetLinkUp(1, 4, 1, offer))


def answered(plane_ports: str | None) -> int:
    """The port at which a target on another host is awaited."""
    made = opened(plane_ports=plane_ports)
    assert made is not None
    sender, plane = made
    with closing(sender):
        assert plane.answer.kind is PlaneKind.TCP
        assert plane.answer.stream == DISTRIBUTIONS
        return int(plane.answer.address.rpartition(":")[2])


def test_a_plane_waits_on_a_port_of_its_range() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    assert answered(f"{port}-{port}") == port
    assert answered(None) > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": VOCABULARY + 1}, "other width"),
        ({"dtype": "float32"}, "other dtype"),
        ({"direction": RowsDirection.TO_DRAFT}, "other direction"),
        ({"name": ""}, "declares no draft_distributions, or speaks another version of it"),
        ({"max_rows": 0}, "at least one row"),
    ],
)
def test_an_offer_of_other_rows_is_refused_by_name(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(replace(DISTRIBUTIONS, **change)) is None
    assert reason in caplog.text
