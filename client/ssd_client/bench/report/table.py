"""A benchmark in the terminal: its progress, and its table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from ssd_client.bench.measure.requests import MeasuredRequest
from ssd_client.bench.measure.settings import MODES
from ssd_client.bench.report.results import Results
from ssd_client.connection.drafts import inside_text, kind_text, planes_text
from ssd_client.printable import printable
from ssd_client.terminal.render import note

_WIDE = 160  # columns of a table in a pipe
_COLUMNS = {
    "tokens/s": "decode_tokens_per_s",
    "output tok/s": "output_throughput",
    "TTFT ms": "median_ttft_ms",
    "TPOT ms": "median_tpot_ms",
    "p99 ITL ms": "p99_itl_ms",
    "tokens/round": "tokens_per_round",
    "hit rate": "hit_rate",
    "late": "late_rounds",
    "missed": "missed_rounds",
    "accepted %": "spec_decode_acceptance_rate",
}


class TerminalProgress:
    """A bar for each run, with its rate; where nobody watches, a line."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def run(self, title: str, requests: int) -> Iterator[Callable[[MeasuredRequest], None]]:
        if not self._console.is_terminal:
            self._console.print(f"{title}: {requests} requests", soft_wrap=True, highlight=False)
            yield lambda measured: None
            return
        tokens = 0
        with bars.Progress(
            bars.TextColumn("{task.description:<34}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            console=self._console,
            transient=True,
        ) as bar:
            task = bar.add_task(title, total=requests, rate="")

            def seen(measured: MeasuredRequest) -> None:
                nonlocal tokens
                tokens += measured.num_tokens
                elapsed = bar.tasks[0].elapsed or 0.0
                rate = f"{tokens / elapsed:.0f} tokens/s" if elapsed else ""
                bar.update(task, advance=1, rate=rate)

            yield seen

    def note(self, line: str) -> None:
        note(self._console, line)


def show_results(results: Results) -> None:
    """Shows the results on stdout."""
    width = None if sys.stdout.isatty() else _WIDE
    console = Console(markup=False, highlight=False, emoji=False, width=width)
    console.print(printable(_setting(results)), soft_wrap=True)
    console.print(_table(results))
    for line in _lines(results):
        console.print(printable(line), soft_wrap=True)


def _setting(results: Results) -> str:
    about, settings = results.about, results.settings
    target = about["target"]
    inside = inside_text(target.get("draft_inside"))
    drafts = ", ".join(filter(None, [*map(_draft, about["drafts"]), inside])) or "none"
    prompts = about["prompts"]
    return (
        f"target {target['name']} ({target['num_parameters']:,} parameters, {target['dtype']}, "
        f"{target['device']}), draft {drafts}; {prompts['count']} prompts of {prompts['name']}, "
        f"{settings.max_tokens} tokens, temperature {settings.temperature:g}, "
        f"{settings.repeats} interleaved repeats"
    )


def _draft(draft: Mapping[str, Any]) -> str:
    about = [kind_text(draft["kind"]), planes_text(draft["planes"])]
    return f"{draft['name']} ({', '.join(filter(None, about))})"


def _table(results: Results) -> Table:
    summary = results.summary()
    loads = len({row["load"] for row in summary}) > 1 or results.settings.loads != (1.0,)
    columns = {title: key for title, key in _COLUMNS.items() if any(key in row for row in summary)}
    table = Table(title=None, show_edge=False, pad_edge=False)
    names = ["mode", *(["load"] if loads else []), *columns]
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in summary:
        cells = [printable(row["mode"]), *([f"{row['load']:g}"] if loads else [])]
        table.add_row(*cells, *(_cell(row.get(key), key) for key in columns.values()))
    return table


def _cell(value: dict[str, float] | None, key: str) -> str:
    if value is None:
        return ""
    median = value["median"]
    if key == "hit_rate":
        return f"{median:.0%}"
    text = f"{median:.3g}" if median < 100 else f"{median:.0f}"
    if key == "decode_tokens_per_s" and value["high"] > value["low"]:
        return f"{text} ({value['low']:.3g} to {value['high']:.3g})"
    return text


def _lines(results: Results) -> list[str]:
    lines = [
        _synthetic(results),
        _speed(results),
        _theory(results),
        _delays(results),
        _failed(results),
        _equality(results),
        _outside(results),
    ]
    if not results.complete:
        lines.append("interrupted: these are the runs that were done; --resume goes on")
    return [line for line in lines if line]


def rates(results: Results) -> dict[str, float]:
    """Tokens a second of each mode at the first load."""
    load = results.settings.loads[0]
    return {
        row["mode"]: row["decode_tokens_per_s"]["median"]
        for row in results.summary()
        if row["load"] == load and row["mode"] in MODES and "decode_tokens_per_s" in row
    }


def _speed(results: Results) -> str:
    found = rates(results)
    pairs = (("ssd", "sync"), ("ssd", "off"), ("sync", "off"))
    return " · ".join(
        f"{a} / {b} {found[a] / found[b]:.2f}" for a, b in pairs if a in found and b in found
    )


def _theory(results: Results) -> str:
    theory, found = results.more.get("theory"), rates(results)
    if theory is None or not results.settings.alone:
        return ""
    parts = [
        f"{mode} {theory[mode]:.3g} ({found[mode] / theory[mode] - 1:+.1%})"
        for mode in MODES
        if mode in found
    ]
    return "predicted tokens/s (measured against it): " + " · ".join(parts)


def _equality(results: Results) -> str:
    equality: dict[str, Any] | None = results.more.get("equality")
    if equality is None:
        return ""
    if equality["differences"]:
        first = equality["differences"][0]
        return (
            f"TEXTS DIFFER: {equality['equal']} of {equality['compared']} are equal; prompt "
            f"{first['prompt']} in mode {first['run']['mode']}: token {first['position']} is "
            f"{first['token']}, not {first['expected']}"
        )
    return f"texts: all {equality['compared']} equal those of {equality['of']}"


def _delays(results: Results) -> str:
    curve = results.more.get("delay_curve", ())
    parts = [f"{at['delay_ms']:g} ms {at['tokens_per_s']:.3g}" for at in curve]
    return "ssd by delay of its link, tokens/s: " + " · ".join(parts) if parts else ""


def _failed(results: Results) -> str:
    failed = results.failed
    total = sum(len(run["requests"]) for run in results.runs.values())
    return f"{len(failed)} of {total} requests FAILED: {failed[0]}" if failed else ""


def _synthetic(results: Results) -> str:
    rate = results.about["target"]["synthetic_acceptance"]
    return f"SYNTHETIC acceptance {rate:g}: texts are not the model's" if rate else ""


def _outside(results: Results) -> str:
    target = results.about["target"]["name"]
    if results.about["prompts"]["in_training"] or not target.startswith("stories"):
        return ""
    return f"note: {results.about['prompts']['name']} is outside of what {target} was trained on"
