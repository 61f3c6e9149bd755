"""Shows a race: columns that fill in a terminal, lines elsewhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ssd_client.chat.screen import STYLES
from ssd_client.connection.closing import Closing
from ssd_client.printable import printable
from ssd_client.race.lanes import Run
from ssd_client.terminal.render import note

_NARROWEST = 24  # characters of a column
_FRAMES = 12  # a second


class RaceScreen(Closing):
    """Shows all runs, for as long as its block runs."""

    @abstractmethod
    def finish(self, run: Run) -> None: ...


class Columns(RaceScreen):
    """One column for each run, its text in the colours of where it came from."""

    def __init__(self, console: Console, headline: str, runs: Sequence[Run]) -> None:
        self._console, self._headline, self._runs = console, headline, runs
        self._live = Live(console=console, refresh_per_second=_FRAMES, get_renderable=self._draw)

    def __enter__(self) -> Columns:
        self._live.start()
        return self

    def close(self) -> None:
        self._live.stop()

    def finish(self, run: Run) -> None:
        self._live.refresh()

    def _draw(self) -> RenderableType:
        across = max(1, min(len(self._runs), self._console.width // _NARROWEST))
        down = -(-len(self._runs) // across)
        height = max(6, (self._console.height - 5) // down)  # a line above, the verdict below
        width = self._console.width // across
        table = Table.grid(expand=True)
        for _ in range(across):
            table.add_column(ratio=1)
        for first in range(0, len(self._runs), across):
            row = self._runs[first : first + across]
            table.add_row(*(self._panel(run, width - 4, height - 2) for run in row))
        return Group(Text(self._headline, style="bold"), table)

    def _panel(self, run: Run, width: int, height: int) -> Panel:
        about = Text(run.lane.where, style="dim")
        taken = len(about.wrap(self._console, width)) if run.lane.where else 0
        lines = self._text(run).wrap(self._console, width)[-max(1, height - taken) :]
        body = Text("\n").join([about, *lines] if run.lane.where else lines)
        rate = f"{run.rate:.1f} tokens/s" if run.rate else run.state
        return Panel(
            body,
            title=f"[bold]{run.lane.name}[/bold]",
            subtitle=rate,
            height=height + 2,
            border_style="green" if run.done else "white",
        )

    def _text(self, run: Run) -> Text:
        """What is done is seen at a glance: nothing is cut off in the middle of a word."""
        text = Text()
        for piece, origin in run.pieces:
            text.append(printable(piece), style=STYLES.get(origin, ""))
        return text


class PlainRaceScreen(RaceScreen):
    """One line for each run, when it is done."""

    def __init__(self, notes: Console, headline: str) -> None:
        self._notes = notes
        note(notes, headline)

    def close(self) -> None:
        """Lines stay as they are."""

    def finish(self, run: Run) -> None:
        note(self._notes, line_of(run))


def line_of(run: Run) -> str:
    rate = f"{run.rate:.1f} tokens/s" if run.rate else "no rate"
    parts = [f"{run.lane.name}: {rate}", f"{len(run.token_ids)} tokens", run.lane.where]
    stats = run.speculation
    if stats is not None and stats.cache_tokens:
        parts.append(f"{stats.cache_tokens} tokens from the cache")
    return " · ".join(part for part in parts if part)
