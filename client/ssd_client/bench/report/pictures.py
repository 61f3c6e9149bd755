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
        place = _SPANS.get((event["service"], event["kind"]))
        name = f"{mode}-{event['service']}-{event['kind']}-{i}"
        if place is not None:
            lane, colour = place
            if event["origin"] == "just_in_time" and event["service"] == "draft":
                colour = AWAITED
            bar = Rectangle(
                (1e3 * start, lane - 0.36), 1e3 * seconds, 0.72, facecolor=colour, lw=0.3, ec="w"
            )
            bar.set_gid(name)
            ax.add_patch(bar)
            titles[name] = _title(event)
        elif event["kind"] == "push" and event["service"] == "draft" and event["tokens"]:
            (mark,) = ax.plot(1e3 * start, 0.5, "^", color="#444", ms=3)
            mark.set_gid(name)
            titles[name] = _title(event)
        elif event["kind"] == "round":
            _draw_outcome(ax, name, event, 1e3 * (start + seconds), span)
            titles[name] = _title(event)
    ax.set_ylim(-0.5, 1.95)
    ax.set_xlim(0, 1e3 * span)
    ax.set_yticks([0, 1], ["draft", "target"], fontsize=8)
    ax.set_title(mode, loc="left", fontsize=9, fontweight="bold", pad=2)
    ax.tick_params(axis="both", length=2, labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return titles


def _draw_outcome(ax: Axes, name: str, event: Mapping[str, Any], at: float, span: float) -> None:
    """How many tokens the round gave, in the colour of what it had found in the cache."""
    if not 0 <= at <= 1e3 * span:
        return
    text = ax.text(
        at,
        1.43,
        f"+{event['accepted'] + 1}",
        color=LOOK_UPS.get(event["look_up"], "#555"),
        fontsize=7,
        ha="right",
    )
    text.set_gid(name)


def _title(event: Mapping[str, Any]) -> str:
    ms = f"{1e3 * event['seconds']:.2f} ms" if event["seconds"] else ""
    facts = [f"{event['service']}: {event['kind']}", ms]
    facts += [f"round {event['round']}"] if event["round"] else []
    facts += [f"{event['rows']} rows"] if event["rows"] else []
    if event["kind"] == "round":
        facts.append(f"{event['accepted']} of {event['tokens']} tokens right")
    elif event["tokens"]:
        facts.append(f"{event['tokens']} tokens")
    facts += [event["look_up"].replace("_", " ")] if event["look_up"] else []
    return ", ".join(fact for fact in facts if fact)


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
    figure = Figure(figsize=(5.2, 3.0))
    ax = figure.subplots()
    for i, row in enumerate(rows):
        rate = row["decode_tokens_per_s"]
        low, high = rate["median"] - rate["low"], rate["high"] - rate["median"]
        (bar,) = ax.bar(
            [i], [rate["median"]], 0.6, color=COLOURS.get(row["mode"], "#777"),
            yerr=[[low], [high]], capsize=4,
        )  # fmt: skip
        bar.set_gid(f"speed-{_slug(row['mode'])}")
        label = ax.text(i, rate["median"] / 2, f"{rate['median']:.3g}", ha="center", color="w")
        label.set_gid(f"speed-label-{_slug(row['mode'])}")
        if theory is not None and row["mode"] in theory:
            (mark,) = ax.plot([i], [theory[row["mode"]]], "D", color="k", ms=6)
            mark.set_gid(f"predicted-{row['mode']}")
    ax.set_xticks(range(len(rows)), [_plain(row["mode"]) for row in rows])
    ax.set_ylabel("tokens/s of a request")
    if theory is not None:
        mark = Line2D([], [], color="k", marker="D", ls="", label="predicted (theorem 7)")
        ax.legend(handles=[mark], frameon=False, fontsize=8)
    return _svg(figure, {})


def accepted_lengths(rounds: Mapping[str, Any]) -> str:
    """How many speculated tokens were right, as shares of rounds."""
    figure = Figure(figsize=(5.2, 2.8))
    ax = figure.subplots()
    shown = [mode for mode in MODES if mode != "off" and rounds.get(mode, {}).get("accepted")]
    width = 0.8 / max(1, len(shown))
    for i, mode in enumerate(shown):
        counts = {int(length): n for length, n in rounds[mode]["accepted"].items()}
        total = sum(counts.values())
        for length, n in counts.items():
            (bar,) = ax.bar(
                [length + (i - (len(shown) - 1) / 2) * width], [n / total], width,
                color=COLOURS[mode], label=mode,
            )  # fmt: skip
            bar.set_gid(f"accepted-{mode}-{length}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("speculated tokens that were right")
    ax.set_ylabel("share of rounds")
    ax.legend(handles=[Patch(color=COLOURS[mode], label=mode) for mode in shown], frameon=False)
    return _svg(figure, {})


def hits_by_position(rounds: Mapping[str, Any]) -> str:
    """What was found in the cache, by how many tokens had been right before."""
    figure = Figure(figsize=(5.2, 2.8))
    ax = figure.subplots()
    found = rounds.get("ssd", {}).get("look_ups", {})
    for length, counts in found.items():
        total, bottom = sum(counts.values()), 0.0
        for result, colour in LOOK_UPS.items():
            share = counts.get(result, 0) / total
            if not share:
                continue
            (bar,) = ax.bar([int(length)], [share], 0.7, bottom=bottom, color=colour)
            bar.set_gid(f"look-up-{length}-{result}")
            bottom += share
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("tokens that were right in the round before")
    ax.set_ylabel("share of look-ups")
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
            label, colour = _plain(mode), COLOURS.get(mode, "#777")
            (line,) = ax.plot(ordered, shares, color=colour, label=label)
            line.set_gid(f"latency-{name}-{_slug(mode)}")
        ax.set_xlabel(f"{name.upper()}, ms")
        ax.set_ylabel("percentile")
        ax.legend(frameon=False, fontsize=8)
    return _svg(figure, {})


def by_load(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second of all requests together, by load."""
    figure = Figure(figsize=(5.2, 2.8))
    ax = figure.subplots()
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = [(row["load"], row["output_throughput"]["median"]) for row in rows
                  if row["mode"] == mode]  # fmt: skip
        label, colour = _plain(mode), COLOURS.get(mode)
        (line,) = ax.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
        line.set_gid(f"load-{_slug(mode)}")
    ax.set_xlabel("load")
    ax.set_ylabel("tokens/s, all requests")
    ax.legend(frameon=False)
    return _svg(figure, {})


def delays(curve: Sequence[Mapping[str, float]]) -> str:
    """Tokens a second over links of several speeds: no hop on a hit."""
    figure = Figure(figsize=(5.2, 2.8))
    ax = figure.subplots()
    points = [(at["delay_ms"], at["tokens_per_s"]) for at in curve]
    (line,) = ax.plot(*zip(*points, strict=True), "o-", color=COLOURS["ssd"])
    line.set_gid("delays-ssd")
    ax.set_ylim(0, 1.15 * max(rate for _, rate in points))
    ax.set_xlabel("delay of the link, ms each way")
    ax.set_ylabel("ssd, tokens/s")
    return _svg(figure, {})


def _plain(text: str) -> str:
    """The text without what the library takes for mathematics."""
    return text.replace("$", r"\$")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _svg(figure: Figure, titles: Mapping[str, str]) -> str:
    """The picture alone, without an XML header; texts stay texts."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ssd"}):
        figure.tight_layout(rect=(0, 0, 1, 0.97))
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]

    def with_title(match: re.Match[str]) -> str:
        title = titles.get(match[1])
        return match[0] if title is None else f"{match[0]}<title>{escape(title)}</title>"

    return re.sub(r'<g id="([^"]+)">', with_title, svg)
