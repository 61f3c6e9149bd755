"""Measures what the theory needs: rates on prompts that are not timed, times of each side alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ssd_client.bench.measure.draft_alone import Round, time_draft
from ssd_client.bench.measure.progress import BenchProgress
from ssd_client.bench.measure.requests import Ask, MeasuredRequest, closed_loop
from ssd_client.bench.measure.settings import MODES
from ssd_client.bench.measure.subject import Subject, Traces
from ssd_client.bench.measure.theory import Prediction, predict, rates_of, times_of
from ssd_client.errors import ClientError
from ssd_client.status.traces import TraceEvent


def learn(
    subject: Subject,
    traces: Traces,
    asks: Mapping[str, Ask],
    prompts: Sequence[str],
    progress: BenchProgress,
) -> Prediction:
    """One request at a time; a ClientError says why nothing can be learnt."""
    learnt: dict[str, list[MeasuredRequest]] = {}
    events: dict[str, list[TraceEvent]] = {}
    for mode in MODES:
        with progress.run(f"learning, {mode}", len(prompts)) as seen:
            learnt[mode] = closed_loop(asks[mode], prompts, 1, seen)
        events[mode] = traces.settled()
        _check(mode, learnt[mode], events[mode])
    progress.note("timing the draft alone")
    draft = time_draft(subject.drafts[0], subject.info, _round(learnt["off"][0], events))
    times = times_of(events["off"], events["sync"], draft)
    return predict(rates_of(learnt["sync"], learnt["ssd"]), times)


def _check(mode: str, done: Sequence[MeasuredRequest], events: Sequence[TraceEvent]) -> None:
    failed = [each.error for each in done if each.error is not None]
    if failed:
        raise ClientError(failed[0])
    needed = {"off": {"round"}, "sync": {"round", "draft", "forward"}, "ssd": {"round"}}[mode]
    if not needed <= {event.kind for event in events}:
        raise ClientError(f"the trace of {mode} shows no rounds")
    if mode != "off" and not any(event.tokens for event in events if event.kind == "round"):
        raise ClientError(f"nothing was speculated in mode {mode}")


def _round(plain: MeasuredRequest, events: Mapping[str, Sequence[TraceEvent]]) -> Round:
    """A round like the target's."""
    depths = [event.tokens for event in events["ssd"] if event.kind == "round"]
    forwards = [event.seconds for event in events["sync"] if event.kind == "forward"]
    return Round(plain.tokens, max(depths), statistics.median(forwards))
