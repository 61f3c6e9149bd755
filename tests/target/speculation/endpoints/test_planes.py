"""The target's end of a tensor plane goes where rows fit, and says by name where they do not."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.speculation.frames import Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.plane import await_target
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.protocol.streams import RowsDirection
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from ssd_target.config import TargetConfig
from ssd_target.front.server import _engine_options, plan_target
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.speculation.endpoints import planes
from ssd_target.speculation.endpoints.planes import open_features, open_plane
from tests.engine.tensor_plane.peer import CPU, NO_LIMIT
from tests.waiting import HANG_SECONDS, wait_until

CONFIG = TargetConfig("stories-target", depth=6)
PLAN = plan_target(CONFIG)
UP = DraftLinkUp(1, 1, False, 64, 2048, 4, "127.0.0.1", True)  # its draft goes 4 deep
STRANGER = DraftLinkUp(1, 1, False, 64, 2048, 4, "127.0.0.1", False)
DISTRIBUTIONS = draft_distributions(PLAN.target.model.vocab_size, 4)


def opened(
    config: TargetConfig = CONFIG,
    up: DraftLinkUp = UP,
    kind: PlaneKind | None = None,
    **change: Any,
) -> tuple[Sender, Receiver | None]:
    """The draft's end, and the target's after an answer with these changes. ``kind``: that the
    answer names."""
    stream = replace(DISTRIBUTIONS, **change)
    plane, answer = await_target(
        PlaneKind.TCP,
        1,
        DISTRIBUTIONS,
        bind_host="127.0.0.1",
        device=CPU,
        connect_timeout_s=NO_LIMIT,
    )
    options = _engine_options(config, PLAN, None)
    said = replace(answer, stream=stream, kind=kind or answer.kind)
    return Sender(plane), open_plane(options, up, Plane(0, 0, said))


def test_rows_that_fit_are_met() -> None:
    sender, receiver = opened()
    assert receiver is not None
    with closing(sender), closing(receiver):
        wait_until(lambda: sender.state is receiver.state is PlaneState.UP)


def assert_refused(log: pytest.LogCaptureFixture, reason: str, **about: Any) -> None:
    sender, receiver = opened(**about)
    with closing(sender):
        assert receiver is None
        assert f"no tensor plane with 127.0.0.1: {reason}" in log.text
    assert sender.join(HANG_SECONDS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 7}, "other width: 7 there"),
        ({"dtype": "float32"}, "other dtype: 'float32' there, 'bfloat16' here"),
        ({"direction": RowsDirection.TO_DRAFT}, "other direction: 'to_draft' there"),
        ({"name": ""}, "the peer declares no draft_distributions, or speaks another version of it"),
    ],
)
def test_an_answer_of_other_rows_is_refused_by_name(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_refused(caplog, reason, **change)


@pytest.mark.parametrize(
    ("up", "kind", "reason"),
    [
        (STRANGER, PlaneKind.NCCL, "NCCL believes its peer: --trust-draft"),
        (UP, PlaneKind.TCP, "--plane-kind does not allow tcp"),
        (UP, PlaneKind.NCCL, "--plane-kind does not allow nccl"),
    ],
)
def test_an_answer_of_a_kind_that_was_not_offered_is_refused(
    up: DraftLinkUp, kind: PlaneKind, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(CONFIG, plane_kind="shared_memory")
    assert_refused(caplog, reason, config=config, up=up, kind=kind)


@pytest.mark.parametrize(
    ("kind", "host", "hides", "refused"),
    [
        (PlaneKind.TCP, "192.0.2.7", True, True),
        (PlaneKind.NCCL, "192.0.2.7", True, True),
        (PlaneKind.SHARED_MEMORY, "192.0.2.7", True, False),
        (PlaneKind.TCP, "127.0.0.1", True, False),
        (PlaneKind.TCP, "192.0.2.7", False, False),
    ],
)
def test_rows_in_clear_text_beside_a_link_with_tls_are_refused(
    kind: PlaneKind,
    host: str,
    hides: bool,
    refused: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the endpoint answers; those of both streams."""
    needs = FeatureNeeds((1, 2), PLAN.target.model.hidden_size, "float32")
    monkeypatch.setattr(planes, "go_to_draft", lambda answer, *about, **options: answer)
    monkeypatch.setattr(planes, "Sender", lambda plane: plane)
    monkeypatch.setattr(planes, "Receiver", lambda plane: plane)
    up = DraftLinkUp(1, 1, False, 64, 2048, 4, host, True, FeatureTerms(needs))
    options = replace(_engine_options(CONFIG, PLAN, None), hides_rows=hides)
    for rows, opens in ((told_features(needs), open_features), (DISTRIBUTIONS, open_plane)):
        opened = opens(options, up, Plane(0, 0, PlaneAnswer(kind, "x", b"", rows)))
        assert (opened is None) == refused
    assert caplog.text.count(f"{kind.value} is clear text, and the link has TLS") == 2 * refused


def test_the_engine_knows_whether_rows_are_to_be_hidden() -> None:
    guarded = replace(CONFIG, draft_tls_ca=Path("ca.pem"))
    assert _engine_options(guarded, PLAN, None).hides_rows
    assert not _engine_options(replace(guarded, insecure_plane=True), PLAN, None).hides_rows
    assert not _engine_options(CONFIG, PLAN, None).hides_rows
