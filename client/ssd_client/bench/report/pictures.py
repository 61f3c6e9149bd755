"""Pictures of a benchmark, as SVG. Everything that is drawn has an id that says what it is."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ssd_client.bench.measure.settings import MODES

TARGET, DRAFT, AWAITED, WAIT = "#2f6db5", "#e08a2b", "#7a4fa3", "#b9bec6"
PREFILL = "#8fb3dd"
COLOURS = {"off": "#8a8f98", "sync": DRAFT, "ssd": TARGET}
LOOK_UPS = {
    "hit": "#3a9a5b",
    "late": "#d9a514",
    "miss_token": "#c8442e",  # red is a miss, and nothing else
    "miss_length": "#e39a8d",
}
MOST_ROUNDS = 14  # rounds of the fastest mode that a timeline shows
_SPANS = {
    ("target", "forward"): (1, TARGET),
    ("target", "prefill"): (1, PREFILL),
    ("target", "wait"): (1, WAIT),
    ("target", "draft"): (0, DRAFT),
    ("draft", "forward"): (0, DRAFT),
}
Events = Sequence[Mapping[str, Any]]


def timeline(timelines: Mapping[str, Events]) -> str:
    """Target and draft of every mode on one time axis."""
    shown = [mode for mode in reversed(MODES) if timelines.get(mode)]
    figure = Figure(figsize=(11, 1.35 * len(shown) + 0.9))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    begin, span = _window({mode: timelines[mode] for mode in shown})
    titles: dict[str, str] = {}
    for mode, ax in zip(shown, axes, strict=True):
        titles |= _draw_mode(ax, mode, timelines[mode], begin[mode], span)
    axes[-1].set_xlabel("ms")
    figure.legend(handles=_legend(), loc="upper center", ncols=8, frameon=False, fontsize=8)
    return _svg(figure, titles)


def _window(timelines: Mapping[str, Events]) -> tuple[dict[str, float], float]:
    """Where each mode begins, after its first rounds, and how long all of them are shown."""
    begins, spans = {}, []
    for mode, events in timelines.items():
        rounds = [event for event in events if event["kind"] == "round"]
        first = rounds[min(3, len(rounds) - 1)] if rounds else events[0]
        last = rounds[min(3 + MOST_ROUNDS, len(rounds) - 1)] if rounds else events[-1]
        begins[mode] = first["begin"]
        spans.append(last["begin"] + last["seconds"] - first["begin"])
    return begins, min(spans)


def _draw_mode(ax: Axes, mode: str, events: Events, begin: float, span: float) -> dict[str, str]:
    """Returns what is said of each bar when one points at it."""
    titles: dict[str, str] = {}
    for i, event in enumerate(events):
        start, seconds = event["begin"] - begin, event["seconds"]
        if start + seconds < 0 or start > span:
            continue
        name = f"{mode}-{event['service']}-{event['kind']}-{i}"
        titles[name] = _title(event)
        if (event["service"], event["kind"]) in _SPANS:
            _draw_bar(ax, name, event, 1e3 * start)
        elif event["kind"] == "push" and event["service"] == "draft" and event["tokens"]:
            ax.plot(1e3 * start, 0.5, "^", color="#444", ms=3, gid=name)
        elif event["kind"] == "round":
            _draw_outcome(ax, name, event, 1e3 * (start + seconds), span)
    ax.set(xlim=(0, 1e3 * span), ylim=(-0.5, 1.95))
    ax.set_yticks([0, 1], ["draft", "target"], fontsize=8)
    ax.set_title(mode, loc="left", fontsize=9, fontweight="bold", pad=2)
    ax.tick_params(axis="both", length=2, labelsize=8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return titles


def _draw_bar(ax: Axes, name: str, event: Mapping[str, Any], start: float) -> None:
    lane, colour = _SPANS[event["service"], event["kind"]]
    awaited = event["origin"] == "just_in_time" and event["service"] == "draft"
    bar = Rectangle(
        (start, lane - 0.36),
        1e3 * event["seconds"],
        0.72,
        facecolor=AWAITED if awaited else colour,
        lw=0.3,
        ec="w",
        gid=name,
    )
    ax.add_patch(bar)


def _draw_outcome(ax: Axes, name: str, event: Mapping[str, Any], at: float, span: float) -> None:
    """How many tokens the round gave, in the colour of what it had found in the cache."""
    if 0 <= at <= 1e3 * span:
        colour = LOOK_UPS.get(event["look_up"], "#555")
        ax.text(
            at, 1.43, f"+{event['accepted'] + 1}", color=colour, fontsize=7, ha="right", gid=name
        )


def _title(event: Mapping[str, Any]) -> str:
    tokens = f"{event['tokens']} tokens" if event["tokens"] else ""
    right = f"{event['accepted']} of {event['tokens']} tokens right"
    facts = (
        f"{event['service']}: {event['kind']}",
        f"{1e3 * event['seconds']:.2f} ms" if event["seconds"] else "",
        f"round {event['round']}" if event["round"] else "",
        f"{event['rows']} rows" if event["rows"] else "",
        right if event["kind"] == "round" else tokens,
        event["look_up"].replace("_", " "),
    )
    return ", ".join(filter(None, facts))


def _legend() -> list[Any]:
    return [
        Patch(color=TARGET, label="target verifies"),
        Patch(color=WAIT, label="target waits"),
        Patch(color=DRAFT, label="draft speculates"),
        Patch(color=AWAITED, label="draft, waited for"),
        Line2D([], [], color="#444", marker="^", ls="", ms=4, label="push"),
        Patch(color=LOOK_UPS["hit"], label="+n: hit"),
        Patch(color=LOOK_UPS["late"], label="late"),
        Patch(color=LOOK_UPS["miss_token"], label="missed"),
    ]


def speed(rows: Sequence[Mapping[str, Any]], theory: Mapping[str, Any] | None) -> str:
    """Tokens a second of each mode, and what the theory predicts."""
    figure, ax = _plot(height=3.0)
    for i, row in enumerate(rows):
        rate = row["decode_tokens_per_s"]
        low, high = rate["median"] - rate["low"], rate["high"] - rate["median"]
        ax.bar(
            [i], [rate["median"]], 0.6, color=COLOURS.get(row["mode"], "#777"),
            yerr=[[low], [high]], capsize=4, gid=f"speed-{_slug(row['mode'])}",
        )  # fmt: skip
        ax.text(
            i, rate["median"] / 2, f"{rate['median']:.3g}", ha="center", color="w",
            gid=f"speed-label-{_slug(row['mode'])}",
        )  # fmt: skip
        if theory is not None and row["mode"] in theory:
            name = f"predicted-{row['mode']}"
            ax.plot([i], [theory[row["mode"]]], "D", color="k", ms=6, gid=name)
    ax.set_xticks(range(len(rows)), [_plain(row["mode"]) for row in rows])
    ax.set_ylabel("tokens/s of a request")
    if theory is not None:
        mark = Line2D([], [], color="k", marker="D", ls="", label="predicted (theorem 7)")
        ax.legend(handles=[mark], frameon=False, fontsize=8)
    return _svg(figure, {})


def accepted_lengths(rounds: Mapping[str, Any]) -> str:
    """How many speculated tokens were right, as shares of rounds."""
    figure, ax = _plot()
    shown = [mode for mode in MODES if mode != "off" and rounds.get(mode, {}).get("accepted")]
    width = 0.8 / max(1, len(shown))
    for i, mode in enumerate(shown):
        counts = {int(length): n for length, n in rounds[mode]["accepted"].items()}
        total = sum(counts.values())
        for length, n in counts.items():
            at = length + (i - (len(shown) - 1) / 2) * width
            name = f"accepted-{mode}-{length}"
            ax.bar([at], [n / total], width, color=COLOURS[mode], gid=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="speculated tokens that were right", ylabel="share of rounds")
    ax.legend(handles=[Patch(color=COLOURS[mode], label=mode) for mode in shown], frameon=False)
    return _svg(figure, {})


def hits_by_position(rounds: Mapping[str, Any]) -> str:
    """What was found in the cache, by how many tokens had been right before."""
    figure, ax = _plot()
    found = rounds.get("ssd", {}).get("look_ups", {})
    for length, counts in found.items():
        total, bottom = sum(counts.values()), 0.0
        for result, colour in LOOK_UPS.items():
            share, name = counts.get(result, 0) / total, f"look-up-{length}-{result}"
            if share:
                ax.bar([int(length)], [share], 0.7, bottom=bottom, color=colour, gid=name)
            bottom += share
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="tokens that were right in the round before", ylabel="share of look-ups")
    names = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in LOOK_UPS.items()]
    ax.legend(handles=names, frameon=False, fontsize=8, ncols=4, loc="lower center",
              bbox_to_anchor=(0.5, 1.0))  # fmt: skip
    return _svg(figure, {})


def latencies(values: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Percentiles of each latency, by mode: {"ttft": {"off": [ms, …]}}."""
    figure = Figure(figsize=(10.6, 2.8))
    axes = figure.subplots(1, len(values), squeeze=False)[0]
    for ax, (name, by_mode) in zip(axes, values.items(), strict=True):
        for mode, ms in by_mode.items():
            ordered = sorted(ms)
            shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
            ax.plot(
                ordered, shares, color=COLOURS.get(mode, "#777"), label=_plain(mode),
                gid=f"latency-{name}-{_slug(mode)}",
            )  # fmt: skip
        ax.set(xlabel=f"{name.upper()}, ms", ylabel="percentile")
        ax.legend(frameon=False, fontsize=8)
    return _svg(figure, {})


def by_load(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second of all requests together, by load."""
    figure, ax = _plot()
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = [(row["load"], row["output_throughput"]["median"]) for row in rows
                  if row["mode"] == mode]  # fmt: skip
        ax.plot(
            *zip(*points, strict=True), "o-", color=COLOURS.get(mode), label=_plain(mode),
            gid=f"load-{_slug(mode)}",
        )  # fmt: skip
    ax.set(xlabel="load", ylabel="tokens/s, all requests")
    ax.legend(frameon=False)
    return _svg(figure, {})


def delays(curve: Sequence[Mapping[str, float]]) -> str:
    """Tokens a second over links of several speeds: no hop on a hit."""
    figure, ax = _plot()
    points = [(at["delay_ms"], at["tokens_per_s"]) for at in curve]
    ax.plot(*zip(*points, strict=True), "o-", color=COLOURS["ssd"], gid="delays-ssd")
    top = 1.15 * max(rate for _, rate in points)
    ax.set(ylim=(0, top), xlabel="delay of the link, ms each way", ylabel="ssd, tokens/s")
    return _svg(figure, {})


def _plain(text: str) -> str:
    """The text without what the library takes for mathematics."""
    return text.replace("$", r"\$")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _plot(height: float = 2.8) -> tuple[Figure, Axes]:
    """A picture with one plot, narrow enough to stand beside another picture."""
    figure = Figure(figsize=(5.2, height))
    return figure, figure.subplots()


def _svg(figure: Figure, titles: Mapping[str, str]) -> str:
    """The picture alone, without an XML header; texts stay texts."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ssd"}):
        figure.tight_layout(rect=(0, 0, 1, 0.97))
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})

    def with_title(match: re.Match[str]) -> str:
        title = titles.get(match[1])
        return match[0] if title is None else f"{match[0]}<title>{escape(title)}</title>"

    _, start, rest = buffer.getvalue().partition("<svg")
    return re.sub(r'<g id="([^"]+)">', with_title, start + rest)
