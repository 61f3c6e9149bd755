"""No limit is met by chance, however slow the machine is; a test that wants one moves the clock."""

import pytest

from ssd_engine.tensor_plane import end, plane
from ssd_engine.tensor_plane.transports import connection, greeting, process_group
from tests.engine.tensor_plane.peer import LIMITS, NO_LIMIT
from tests.engine.tensor_plane.planes import Clock


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in LIMITS:
        monkeypatch.setattr(module, name, NO_LIMIT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of every plane that this process opens."""
    clock = Clock()
    for module in (connection, end, greeting, plane, process_group):
        monkeypatch.setattr(module, "time", clock)
    return clock
