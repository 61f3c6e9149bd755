"""What each fault has cost: a row, its verdict, and the table of the docs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.faults.streams import Verdict

HEAD = (
    "| fault | process | equal | told an error | cut off | lost | longest gap, s "
    "| ready again, s |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    fault: str
    process: str
    verdicts: Counter[Verdict]
    gap: float  # the longest of a stream, in seconds
    ready_after: float  # seconds
    also_fit: frozenset[Verdict] = frozenset()  # beside equal texts
    most_gap: float = float("inf")
    errors: tuple[str, ...] = ()  # what readers were told, or saw of a broken connection

    def __str__(self) -> str:
        counts = [self.verdicts[each] for each in Verdict]
        cells = (self.fault, self.process, *counts, f"{self.gap:.1f}", f"{self.ready_after:.1f}")
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def problems(self) -> list[str]:
        found = [
            f"{count} streams: {verdict}"
            for verdict, count in self.verdicts.items()
            if verdict not in {Verdict.EQUAL, *self.also_fit}
        ]
        if self.gap > self.most_gap:
            found.append(f"a stream stood still for {self.gap:.1f} s")
        return [f"{self.fault} {self.process}: {problem}" for problem in found]


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEAD, *map(str, rows)])


def write(page: Path, rows: Sequence[Row]) -> None:
    """Replace the table that stands there, which its head tells from others."""
    before, head, after = page.read_text().partition(HEAD)
    if not head:
        raise SystemExit(f"{page} has no table that begins with {HEAD.splitlines()[0]}")
    lines = after.lstrip("\n").splitlines(keepends=True)
    while lines and lines[0].startswith("|"):
        lines.pop(0)
    page.write_text(f"{before}{table(rows)}\n{''.join(lines)}")
