"""Warnings that others cause: few lines, bounded memory, and a count of the rest."""

import pytest

from ssd_engine.process.sparse_log import MAX_ENTRIES, QUIET_SECONDS, SparseLog


class Warnings:
    """With a clock that is set by hand."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        self.sparse = SparseLog(lambda: self.now)
        self._caplog = caplog

    def said(self) -> list[str]:
        """Since the last look."""
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    return Warnings(caplog)


def test_one_of_a_kind_in_a_while_with_the_number_of_the_others(warnings: Warnings) -> None:
    for _ in range(1000):
        warnings.sparse.warning("one kind", "refused")
    warnings.sparse.warning("another", "wrong secret")
    warnings.now = QUIET_SECONDS
    warnings.sparse.warning("one kind", "refused")
    assert warnings.said() == ["refused", "wrong secret", "refused (999 more before it)"]


def test_hosts_without_end_share_a_line_and_bounded_memory(warnings: Warnings) -> None:
    for number in range(1000):
        warnings.sparse.warning("kind", f"refused {number}", f"host {number}")
    assert warnings.said() == [f"refused {number}" for number in range(MAX_ENTRIES + 1)]
    assert len(warnings.sparse._entries) == MAX_ENTRIES + 1  # one of them stands for all others
    warnings.now = QUIET_SECONDS
    warnings.sparse.warning("kind", "refused one more", "one more")
    assert warnings.said() == ["refused one more"]  # there is room for it again
    for number in range(MAX_ENTRIES):
        warnings.sparse.warning("kind", f"refused again {number}", f"again {number}")
    left_out = 1000 - (MAX_ENTRIES + 1)
    last = f"refused again {MAX_ENTRIES - 2} ({left_out} more before it)"
    assert warnings.said()[-1] == last


def test_what_was_left_out_of_a_host_that_is_forgotten_is_said_with_others(
    warnings: Warnings,
) -> None:
    for number in range(MAX_ENTRIES):
        for _ in range(3):
            warnings.sparse.warning("kind", f"refused {number}", f"host {number}")
    warnings.now = QUIET_SECONDS
    for number in range(MAX_ENTRIES, 2 * MAX_ENTRIES):
        warnings.sparse.warning("kind", f"refused {number}", f"host {number}")
    last = f"refused {2 * MAX_ENTRIES - 1} ({2 * MAX_ENTRIES} more before it)"
    assert last in warnings.said()
