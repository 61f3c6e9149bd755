"""`ssd-client report`: pictures of a benchmark that was run before."""

from __future__ import annotations

from pathlib import Path

import click

from ssd_client.bench.report.report import write_report
from ssd_client.bench.report.results import check_extra, check_output, read_results, write_whole
from ssd_client.errors import BadInputError


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The report, one HTML file.")
@click.option("--timeline", type=click.Path(path_type=Path), help="The timeline alone, as SVG.")
def report(results: Path, out: Path | None, timeline: Path | None) -> None:
    """Draws RESULTS, the --out of a benchmark.

    Exit codes: 0 done, 1 failed, 2 bad input.
    """
    if out is None and timeline is None:
        raise BadInputError("nothing to draw: give --out or --timeline")
    check_extra("report", "matplotlib")
    for flag, path in (("--out", out), ("--timeline", timeline)):
        if path is not None:
            check_output(flag, path)
    content = read_results(results)
    if out is not None:
        write_report(content, out)
    if timeline is not None:
        if not content.get("timelines"):
            raise BadInputError(f"{results}: no traces were kept, so there is no timeline")
        from ssd_client.bench.report import pictures

        write_whole(timeline, pictures.timeline(content["timelines"]))
