"""What a speculation was drawn from comes in time, or the round goes on without it."""

import pytest

from ssd_engine.speculation.frames import Branch, Branches, Plane, Verification
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import Mode, SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from tests.engine.tensor_plane.peer import DISTRIBUTIONS, make_rows
from tests.engine.tensor_plane.planes import plane
from tests.target.sequences import make_sequence
from tests.target.speculation.rounds import end_plain_round
from tests.waiting import wait_until

LINK, EPOCH = 3, 2


def launch_a_hit(speculator: SpeculationCoordinator) -> RowSpeculation:
    """Round 1 of a sequence, whose three tokens its endpoint drew."""
    sequence = make_sequence(1, [1, 2], mode=Mode.SSD, verification=Verification.REJECTION)
    speculator.begin(sequence)
    branches = Branches(sequence.id, 0, [Branch(0, 7, 0, [4, 5, 6])])
    speculator.endpoints.follow(LINK, EPOCH, [branches], None)
    end_plain_round(speculator, sequence)
    rows = speculator.take([sequence])
    speculator.launch(rows)
    return rows[0]


@pytest.mark.parametrize("in_time", [True, False])
def test_the_loop_never_waits_for_rows(in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are late cut the speculation before the first of them."""
    with plane(PlaneKind.TCP) as (sender, receiver):
        options = SpeculationOptions(adapt_depth=False)
        speculator = SpeculationCoordinator(
            options, DISTRIBUTIONS.width, open_plane=lambda up, plane: receiver
        )
        speculator.endpoints.connected(DraftLinkUp(LINK, EPOCH, False, 4, 100, 6, trusted=True))
        answer = PlaneAnswer(PlaneKind.TCP, "", b"", DISTRIBUTIONS)
        speculator.endpoints.follow(LINK, EPOCH, [Plane(0, 0, answer)], None)
        row = launch_a_hit(speculator)
        assert len(row.speculation) == 3
        drawn_from = make_rows(1, 3)
        if in_time:
            sender.send(RowsKey(1, 1), drawn_from)
            wait_until(lambda: receiver.received == 3)
        monkeypatch.setattr(receiver._news, "wait_for", lambda *_: pytest.fail("it waits"))
        (given,) = speculator.distributions.of([row])
        assert given is not None
        assert given.wire is not None
        assert given.wire.equal(drawn_from[: 3 * in_time])
        assert row.num_cut == (0 if in_time else 3)
        assert row.state.stats.fallbacks.get("no distributions", 0) == (not in_time)
