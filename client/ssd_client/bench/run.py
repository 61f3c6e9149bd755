"""The benchmark: warm up, learn on other prompts, then run the modes in turns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ssd_client.bench.baseline import OpenAIAsk
from ssd_client.bench.draft_alone import Round, time_draft
from ssd_client.bench.equality import compare_texts
from ssd_client.bench.metrics import metrics_of
from ssd_client.bench.prompts import PromptSet
from ssd_client.bench.requests import Ask, Measured, TargetAsk, closed_loop, open_loop
from ssd_client.bench.results import Results
from ssd_client.bench.rounds import RoundCounts
from ssd_client.bench.settings import MODES, RunKey, Settings
from ssd_client.bench.subject import Subject, Traces
from ssd_client.bench.theory import predict, rates_of, times_of
from ssd_client.errors import ClientError
from ssd_client.request import GenerateOptions
from ssd_client.traces import TraceEvent, between

_SETTLE_S = 0.2  # what a draft does beyond a request's end is over


class Progress(Protocol):
    def begin(self, title: str, requests: int) -> None: ...

    def seen(self, measured: Measured) -> None: ...

    def end(self) -> None: ...

    def note(self, line: str) -> None: ...


@dataclass(frozen=True)
class Outputs:
    results: Path | None = None
    resume: bool = False


class Bench:
    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        prompts: PromptSet,
        others: Sequence[str],
        progress: Progress,
        command: Sequence[str],
    ) -> None:
        """``others``: prompts from which the theory's rates are learnt."""
        self._subject, self._settings, self._prompts = subject, settings, prompts
        self._others = others
        self._progress = progress
        about = {
            **subject.about(command),
            "prompts": {
                "name": prompts.name,
                "count": len(prompts.prompts),
                "in_training": prompts.in_training,
            },
        }
        self.results = Results(settings, about)
        self.timeline: list[TraceEvent] = []
        self._traces = Traces(subject)
        self._counts: dict[str, RoundCounts] = defaultdict(RoundCounts)
        self._asks = {kind: self._ask(kind) for kind in settings.kinds}

    def run(self, outputs: Outputs) -> Results:
        """Whatever ends it, the runs that were done are saved."""
        results = self.results
        if outputs.resume and outputs.results is not None:
            count = results.resume(outputs.results)
            self._progress.note(f"{count} runs of {outputs.results} are taken over")
        try:
            self._warm_up()
            if self._can_predict:
                self._predict()
            for key in self._settings.runs():
                if key not in results.runs:
                    self._run(key)
                    self._save(outputs)
        finally:
            self._finish()
            self._save(outputs)
        return results

    @property
    def missing_traces(self) -> list[str]:
        return self._traces.missing

    # One run

    def _run(self, key: RunKey) -> None:
        settings, prompts = self._settings, self._prompts.prompts
        self._progress.begin(_title(key, settings), len(prompts))
        begin = time.monotonic()
        try:
            if settings.request_rate:
                done = open_loop(
                    self._asks[key.mode],
                    prompts,
                    key.load,
                    settings.seed + key.repeat,
                    self._progress.seen,
                )
            else:
                done = closed_loop(
                    self._asks[key.mode], prompts, int(key.load), self._progress.seen
                )
        finally:
            self._progress.end()
        seconds = time.monotonic() - begin
        self._look_at_trace(key, done)
        devices = self._subject.devices(key.mode)
        metrics = metrics_of(done, seconds, devices)
        self.results.add(key, metrics, [each.as_json() for each in done])

    def _look_at_trace(self, key: RunKey, done: Sequence[Measured]) -> None:
        if not self._traces.has_target or key.mode not in MODES:
            return
        time.sleep(_SETTLE_S)
        events = self._traces.take()
        self._counts[key.mode].add(events)
        if key.repeat == 0 and key.load == self._settings.loads[0] and done:
            first = done[0]
            shown = between(events, first.begin, first.end)
            self.timeline += shown
            timelines = self.results.more.setdefault("timelines", {})
            timelines[key.mode] = [
                {**asdict(event), "begin": event.begin - first.begin} for event in shown
            ]

    # Before and after

    def _ask(self, kind: str) -> Ask:
        settings = self._settings
        if kind not in MODES:
            return OpenAIAsk(kind, settings)

        def ask(number: int, prompt: str) -> Measured:
            options = GenerateOptions(
                temperature=settings.temperature,
                seed=settings.seed + number,
                max_tokens=settings.max_tokens,
                ignore_eos=settings.ignore_eos,
                mode=kind,
                depth=settings.depth,
            )
            return TargetAsk(self._subject.target, options, settings.chat)(number, prompt)

        return ask

    def _warm_up(self) -> None:
        prompts = self._others[: self._settings.warm_up]
        for kind, ask in self._asks.items():
            self._progress.begin(f"warm-up, {kind}", len(prompts))
            for number, prompt in enumerate(prompts):
                measured = ask(number, prompt)
                if measured.error is not None:
                    raise ClientError(measured.error)
                self._progress.seen(measured)
            self._progress.end()
        self._traces.take()

    def _finish(self) -> None:
        results = self.results
        made_up = self._subject.info.synthetic_acceptance > 0  # texts are nobody's there
        if len({key.mode for key in results.runs} & set(MODES)) > 1 and not made_up:
            results.more["equality"] = compare_texts(results.runs).as_json()
        if self._counts:
            results.more["rounds"] = {mode: each.as_json() for mode, each in self._counts.items()}

    def _save(self, outputs: Outputs) -> None:
        if outputs.results is not None:
            self.results.save(outputs.results)

    # Theory

    @property
    def _can_predict(self) -> bool:
        return (
            set(MODES) <= set(self._settings.modes)
            and self._traces.has_target
            and len(self._subject.drafts) == 1
            and bool(self._others)
        )

    def _predict(self) -> None:
        """Rates and times from other prompts, one request at a time."""
        learnt: dict[str, list[Measured]] = {}
        events: dict[str, list[TraceEvent]] = {}
        for mode in MODES:
            self._progress.begin(f"learning, {mode}", len(self._others))
            learnt[mode] = closed_loop(self._asks[mode], self._others, 1, self._progress.seen)
            self._progress.end()
            time.sleep(_SETTLE_S)
            events[mode] = self._traces.take()
        failed = [each.error for mode in MODES for each in learnt[mode] if each.error]
        if failed:
            raise ClientError(failed[0])
        rounds = [e for e in events["ssd"] if e.kind == "round" and e.tokens]
        forwards = [e for e in events["sync"] if e.kind == "forward"]
        if not rounds or not forwards:
            self._progress.note("no prediction: nothing was speculated")
            return
        about = Round(
            prompt=learnt["off"][0].tokens,
            depth=max(event.tokens for event in rounds),
            verify_s=sorted(e.seconds for e in forwards)[len(forwards) // 2],
        )
        self._progress.note("timing the draft alone")
        draft = time_draft(self._subject.drafts[0], self._subject.info, about)
        times = times_of(events["off"], events["sync"], draft)
        prediction = predict(rates_of(learnt["sync"], learnt["ssd"]), times)
        self.results.more["theory"] = prediction.as_json()


def _title(key: RunKey, settings: Settings) -> str:
    unit = "requests/s" if settings.request_rate else "at a time"
    name = key.mode if key.mode in MODES else "baseline"
    return f"{key.repeat + 1}/{settings.repeats} {name}, {key.load:g} {unit}"
