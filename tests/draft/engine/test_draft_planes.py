"""The draft's end of a tensor plane, opened as its operator said."""

import socket
from contextlib import closing

from ssd_draft.config import DraftConfig
from ssd_draft.engine.planes import PlaneSenderOpener
from ssd_draft.front.server import _engine_options, plan_draft
from ssd_draft.records import PlaneTerms, TargetLinkUp

FAR = PlaneTerms(["shared_memory", "tcp", "gloo"], "another host", "")


def answered(plane_ports: str | None) -> int:
    """The port at which a target on another host is awaited."""
    config = DraftConfig("stories-draft", plane_ports=plane_ports)
    opened = PlaneSenderOpener(_engine_options(config, plan_draft(config)))(
        TargetLinkUp(1, "t", 4, 1, FAR)
    )
    assert opened is not None
    sender, plane = opened
    with closing(sender):
        assert plane.kind == "tcp"
        return int(plane.address.rpartition(":")[2])


def test_a_plane_waits_on_a_port_of_its_range() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    assert answered(f"{port}-{port}") == port
    assert answered(None) > 0
