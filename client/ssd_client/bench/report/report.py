"""A benchmark as one HTML file that needs nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssd_client.bench.measure.settings import MODES
from ssd_client.bench.report.results import write_whole
from ssd_client.connection.drafts import inside_text, kind_text, planes_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1340px; margin: 2em auto; padding: 0 1em;
       color: #1c2330; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .7em; border-bottom: 1px solid #d8dce3; text-align: right; }
th:first-child, td:first-child { text-align: left; }
code { background: #f1f3f6; padding: .1em .3em; }
.pair { display: flex; flex-wrap: wrap; gap: 1em; }
.pair figure { flex: 1 1 460px; }
figure { margin: 0; }
.wide { overflow-x: auto; }
#summary { font-size: 13px; }
#summary td { white-space: nowrap; }
#summary th, #summary td { padding: .25em .5em; }
#summary th { vertical-align: bottom; }
code { overflow-wrap: anywhere; }
.bad { background: #fff3cd; border-left: 4px solid #8a6d1a; padding: .4em .8em; font-weight: bold; }
svg { max-width: 100%; height: auto; }
"""
FITS = 0.15  # share of a prediction by which a run may differ from it
_COLUMNS = {
    "tokens/s": "decode_tokens_per_s",
    "range": "interval",
    "output tokens/s": "output_throughput",
    "per device": "tokens_per_s_per_device",
    "TTFT, ms": "median_ttft_ms",
    "TPOT, ms": "median_tpot_ms",
    "p99 ITL, ms": "p99_itl_ms",
    "tokens/round": "tokens_per_round",
    "hit rate": "hit_rate",
    "late": "late_rounds",
    "missed": "missed_rounds",
    "wait/round, ms": "wait_per_round_ms",
    "acceptance, %": "spec_decode_acceptance_rate",
}


def write_report(content: Mapping[str, Any], path: Path) -> None:
    """``content``: the JSON of the results."""
    write_whole(path, "\n".join(_page(content)) + "\n")


def _page(content: Mapping[str, Any]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f"<title>SSD benchmark: {escape(content['target']['name'])}</title>"
    yield f"<style>{_STYLE}</style>\n</head>\n<body>"
    yield "<h1>Speculative speculative decoding, measured</h1>"
    yield from _setting(content)
    yield from _speeds(content)
    yield from _timeline(content)
    yield from _speculation(content)
    yield from _latencies(content)
    yield "</body>\n</html>"


def _setting(content: Mapping[str, Any]) -> Iterator[str]:
    target, settings, prompts = content["target"], content["settings"], content["prompts"]
    if not content["complete"]:
        yield '<p class="bad">Interrupted: only the runs that were done are shown.</p>'
    yield f"<p><code>{escape(content['command'])}</code></p>"
    drafts = ", ".join(_model(draft) for draft in content["drafts"]) or "none"
    client = content["client"]
    yield (
        f"<p>Target {_model(target)}; draft {drafts}. {prompts['count']} prompts of "
        f"{escape(prompts['name'])}, at most {settings['max_tokens']} tokens, temperature "
        f"{settings['temperature']:g}, {settings['repeats']} interleaved repeats (range: from 6 "
        f"repeats on the 95 % interval of the median). Services "
        f"{escape(target['version'])}; client on {escape(client['system'])} "
        f"{escape(client['machine'])}, {client['cores']} cores, Python "
        f"{escape(client['python'])}.</p>"
    )
    if not prompts["in_training"] and target["name"].startswith("stories"):
        yield '<p class="bad">These prompts are outside of what the model was trained on.</p>'
    if target.get("synthetic_acceptance"):
        yield (
            f'<p class="bad">SYNTHETIC acceptance {target["synthetic_acceptance"]:g}: texts are '
            "not the model's.</p>"
        )
    failed = [r["error"] for run in content["runs"] for r in run["requests"] if r["error"]]
    if failed:
        yield f'<p class="bad">{len(failed)} requests failed: {escape(failed[0])}</p>'
    equality = content.get("equality")
    if equality and equality["differences"]:
        yield (
            f'<p class="bad" id="equality">Texts differ: {equality["equal"]} of '
            f"{equality['compared']} are equal.</p>"
        )
    elif equality:
        yield (
            f'<p id="equality">The texts of all modes are equal, token for token '
            f"({equality['compared']} compared).</p>"
        )


def _model(info: Mapping[str, Any]) -> str:
    """A target, or a draft, which has a kind; files of earlier versions name none."""
    size = info.get("num_parameters", 0) / 1e6
    facts = [
        kind_text(info.get("kind", "")),
        f"{size:,.1f}M parameters" if size else "",
        info.get("dtype", ""),
        info.get("device", ""),
        planes_text(info.get("planes", ())),
        inside_text(info.get("draft_inside")),
    ]
    return f"<b>{escape(info['name'])}</b> ({', '.join(escape(f) for f in facts if f)})"


def _speeds(content: Mapping[str, Any]) -> Iterator[str]:
    from ssd_client.bench.report import pictures

    rows = content["summary"]
    yield "<h2>Speed</h2>"
    yield _table(rows)
    first = [row for row in rows if row["load"] == rows[0]["load"]]
    drawn = [row for row in first if "decode_tokens_per_s" in row]
    yield '<div class="pair">'
    yield _figure("speed", pictures.speed(drawn, content.get("theory")))
    if len({row["load"] for row in rows}) > 1:
        yield _figure("by-load", pictures.by_load(rows))
    yield "</div>"
    if content.get("delay_curve"):
        yield _figure("delays", pictures.delays(content["delay_curve"]))
    if content.get("theory") and rows[0]["load"] == 1.0:
        yield from _theory(content["theory"], drawn)


def _theory(theory: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    times, rates = theory["times"], theory["rates"]
    verify = times["verify"]
    yield (
        f"<p>Predicted from times of each side alone and rates on other prompts: a verification "
        f"{1e3 * verify:.1f} ms, a tree {times['draft']['tree'] / verify:.2f} and a backup "
        f"{times['draft']['backup'] / verify:.2f} of it; {rates['p']:.0%} of rounds from the "
        f"cache with {rates['e_hit']:.2f} tokens, {rates['e_miss']:.2f} otherwise; "
        f"{rates['e_sync']:.2f} tokens a round in turns. Ceiling of ssd over sync: "
        f"{theory['ceiling']:.2f}.</p>"
    )
    yield "<table id='theory'><tr><th>mode</th><th>predicted</th><th>measured</th><th></th></tr>"
    for row in rows:
        if row["mode"] in MODES:
            found, said = row["decode_tokens_per_s"]["median"], theory[row["mode"]]
            yield (
                f"<tr><td>{row['mode']}</td><td>{said:.1f}</td><td>{found:.1f}</td>"
                f"<td>{found / said - 1:+.1%}</td></tr>"
            )
    yield "</table>"
    for row in rows:
        if row["mode"] in MODES:
            yield from _unlike_theory(row, theory[row["mode"]])


def _unlike_theory(row: Mapping[str, Any], said: float) -> Iterator[str]:
    """Each side was timed alone, and before: what differs much has another cause."""
    share = row["decode_tokens_per_s"]["median"] / said - 1
    if abs(share) <= FITS:
        return
    cause = (
        "something else took its time while it ran: other work on these machines, a link that is "
        "slow, a draft that was late"
        if share < 0
        else "the times of each side alone were taken while something else ran"
    )
    yield (
        f'<p class="bad">{row["mode"]} is {abs(share):.0%} {"below" if share < 0 else "above"} '
        f"what was predicted. As a rule, {cause}. Measure again on quiet machines.</p>"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        title: key
        for title, key in _COLUMNS.items()
        if key == "interval" or any(key in row for row in rows)
    }
    head = "".join(f"<th>{escape(title)}</th>" for title in ("mode", "load", *columns))
    lines = [
        "<tr>"
        + f"<td>{escape(row['mode'])}</td><td>{row['load']:g}</td>"
        + "".join(f"<td>{_cell(row, key)}</td>" for key in columns.values())
        + "</tr>"
        for row in rows
    ]
    table = f"<table id='summary'><tr>{head}</tr>{''.join(lines)}</table>"
    return f'<div class="wide">{table}</div>'


def _cell(row: Mapping[str, Any], key: str) -> str:
    if key == "interval":
        rate = row.get("decode_tokens_per_s")
        if rate is None or rate["high"] == rate["low"]:
            return ""
        return f"{rate['low']:.3g}–{rate['high']:.3g}"
    value = row.get(key)
    if value is None:
        return ""
    if key == "hit_rate":
        return f"{value['median']:.0%}"
    return f"{value['median']:.3g}" if value["median"] < 100 else f"{value['median']:.0f}"


def _timeline(content: Mapping[str, Any]) -> Iterator[str]:
    timelines = {mode: each for mode, each in content.get("timelines", {}).items() if each}
    yield "<h2>Target and draft at work</h2>"
    if not timelines:
        yield "<p>No traces were kept: start the services with <code>--trace-events</code>.</p>"
        return
    from ssd_client.bench.report import pictures

    yield (
        "<p>The same story in each mode, on one time axis. In <i>ssd</i> the draft prepares while "
        "the target verifies; in <i>sync</i> they take turns. +n: tokens of a round.</p>"
    )
    yield _figure("timeline", pictures.timeline(timelines))


def _speculation(content: Mapping[str, Any]) -> Iterator[str]:
    rounds = content.get("rounds")
    if not rounds:
        return
    from ssd_client.bench.report import pictures

    yield "<h2>Speculation</h2>"
    yield '<div class="pair">'
    yield _figure("accepted", pictures.accepted_lengths(rounds))
    if rounds.get("ssd", {}).get("look_ups"):
        yield _figure("hits", pictures.hits_by_position(rounds))
    yield "</div>"


def _latencies(content: Mapping[str, Any]) -> Iterator[str]:
    from ssd_client.bench.report import pictures

    values: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("ttft", "itl", "e2el")
    }
    for run in content["runs"]:
        for request in run["requests"]:
            moments = [at for at, _ in request["arrivals"]]
            if request["error"] is not None or not moments:
                continue
            values["ttft"][run["mode"]].append(moments[0])
            gaps = [b - a for a, b in pairwise(moments)]
            values["itl"][run["mode"]] += gaps
            values["e2el"][run["mode"]].append(request["e2el_ms"])
    yield "<h2>Latency</h2>"
    yield _figure("latency", pictures.latencies(values))


def _figure(name: str, svg: str) -> str:
    return f'<figure id="{name}">{svg}</figure>'
