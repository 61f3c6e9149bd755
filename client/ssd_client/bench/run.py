"""The benchmark: warm up, learn on other prompts, then run the modes in turns."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssd_client.bench.measure.delay_proxy import DelayProxy
from ssd_client.bench.measure.equality import compare_texts
from ssd_client.bench.measure.learning import learn
from ssd_client.bench.measure.metrics import metrics_of
from ssd_client.bench.measure.openai import OpenAIServer
from ssd_client.bench.measure.progress import BenchProgress
from ssd_client.bench.measure.prompts import PromptSet
from ssd_client.bench.measure.requests import (
    Ask,
    MeasuredRequest,
    ask_target,
    closed_loop,
    open_loop,
)
from ssd_client.bench.measure.rounds import add_rounds, count_rounds
from ssd_client.bench.measure.settings import MODES, RunKey, Settings
from ssd_client.bench.measure.subject import Subject, Traces
from ssd_client.bench.report.results import Results
from ssd_client.errors import ClientError
from ssd_client.generate.api import Client
from ssd_client.generate.request import TextPrompt, chat_of
from ssd_client.generate.request_options import RequestOptions
from ssd_client.status.traces import TraceEvent, between


class Bench:
    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        prompts: PromptSet,
        others: Sequence[str],
        progress: BenchProgress,
        command: str,
    ) -> None:
        """``others``: prompts from which the theory's rates are learnt."""
        self._subject, self._settings, self._prompts = subject, settings, prompts
        self._others, self._progress = others, progress
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
        self.traces = Traces(subject)
        self._asks = {kind: self._ask(kind, settings) for kind in settings.kinds}

    def run(self, out: Path | None, resume: bool) -> None:
        """Whatever ends it, the runs that were done are saved in `out`."""
        results = self.results
        if resume and out is not None and out.exists():
            count = results.resume(out)
            self._progress.note(f"{count} runs of {out} are taken over")
        try:
            self._warm_up()
            if "theory" not in results.more:
                self._predict()
            for key in self._settings.runs():
                if key not in results.runs:
                    self._run(key)
                    self._save(out)
        finally:
            self._finish()
            self._save(out)

    # One run

    def _run(self, key: RunKey) -> None:
        prompts = self._prompts.prompts
        with self._progress.run(_title(key, self._settings), len(prompts)) as seen:
            begin = time.monotonic()
            done = self._ask_all(key, prompts, seen)
            seconds = time.monotonic() - begin
        errors = [each.error for each in done if each.error is not None]
        if len(errors) == len(done):
            raise ClientError(errors[0])  # nothing was measured: a later run may be luckier
        events = self.traces.settled() if self._is_traced(key) else []
        self._keep_timeline(key, done[0], events)
        devices = self._subject.devices(key.mode) if key.mode in MODES else None
        metrics = metrics_of(done, seconds, devices)
        rounds = count_rounds(events) if events else None
        self.results.add(key, metrics, [each.as_json() for each in done], rounds)

    def _ask_all(
        self, key: RunKey, prompts: Sequence[str], seen: Callable[[MeasuredRequest], None]
    ) -> list[MeasuredRequest]:
        settings, ask = self._settings, self._asks[key.mode]
        if settings.request_rate:
            return open_loop(ask, prompts, key.load, settings.seed + key.repeat, seen)
        return closed_loop(ask, prompts, int(key.load), seen)

    def _is_traced(self, key: RunKey) -> bool:
        return self.traces.has_target and key.mode in MODES

    def _keep_timeline(
        self, key: RunKey, first: MeasuredRequest, events: Sequence[TraceEvent]
    ) -> None:
        """Keep the events of the first request of each mode."""
        timelines: dict[str, Any] = self.results.more.setdefault("timelines", {})
        if not events or key.mode in timelines or key.load != self._settings.loads[0]:
            return
        shown = between(events, first.begin, first.end)
        self.timeline += shown
        timelines[key.mode] = [
            {**asdict(event), "begin": event.begin - first.begin} for event in shown
        ]

    def delay_curve(self, proxy: DelayProxy, delays_ms: Sequence[float], out: Path | None) -> None:
        """Mode ssd over slower and slower links, one request at a time."""
        prompts, curve = self._prompts.prompts, []
        for ms in delays_ms:
            proxy.delay_s = ms / 1e3
            with self._progress.run(f"ssd, {ms:g} ms each way", len(prompts)) as seen:
                done = closed_loop(self._asks["ssd"], prompts, 1, seen)
            rates = [1 / each.tpot_s for each in done if each.tpot_s]
            if not rates:
                raise ClientError(done[0].error or "nothing was generated")
            curve.append({"delay_ms": ms, "tokens_per_s": statistics.median(rates)})
        proxy.delay_s = 0.0
        self.results.more["delay_curve"] = curve
        self._save(out)

    # Before and after

    def _ask(self, kind: str, settings: Settings) -> Ask:
        if kind not in MODES:
            return baseline_ask(OpenAIServer(kind), settings)
        client = Client.over([self._subject.target])
        options = RequestOptions(
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            ignore_eos=settings.ignore_eos,
            mode=kind,
        )
        if settings.depth is not None:
            options["depth"] = settings.depth
        if settings.json_schema is not None:
            options["json_schema"] = settings.json_schema

        def ask(number: int, prompt: str) -> MeasuredRequest:
            asked = chat_of(prompt) if settings.chat else TextPrompt(prompt)
            return ask_target(client, number, asked, {**options, "seed": settings.seed + number})

        return ask

    def _warm_up(self) -> None:
        """Some requests in each mode; and every prompt once, so that no mode is the first to find
        it outside of the prefix cache."""
        for kind, ask in self._asks.items():
            self._hear(f"warm-up, {kind}", ask, self._others[: self._settings.warm_up])
        short = dataclasses.replace(self._settings, max_tokens=1, ignore_eos=False)
        for kind in (*self._settings.modes[:1], *self._settings.baselines):
            self._hear(f"prompts, {kind}", self._ask(kind, short), self._prompts.prompts)
        self.traces.take()

    def _hear(self, title: str, ask: Ask, prompts: Sequence[str]) -> None:
        with self._progress.run(title, len(prompts)) as seen:
            done = closed_loop(ask, prompts, 1, seen)
        for measured in done:
            if measured.error is not None:
                raise ClientError(measured.error)

    def _finish(self) -> None:
        results = self.results
        self._subject.look_again()
        made_up = self._subject.info.synthetic_acceptance > 0  # texts are nobody's there
        if len({key.mode for key in results.runs} & set(MODES)) > 1 and not made_up:
            results.more["equality"] = compare_texts(results.runs).as_json()
        counted = {
            mode: [run["rounds"] for key, run in results.runs.items()
                   if key.mode == mode and run["rounds"]]
            for mode in self._settings.modes
        }  # fmt: skip
        found = {mode: add_rounds(counts) for mode, counts in counted.items() if counts}
        if found:
            results.more["rounds"] = found

    def _save(self, out: Path | None) -> None:
        """Nothing yet is no reason to touch what is there."""
        if out is not None and self.results.runs:
            self.results.save(out)

    # Theory

    def _predict(self) -> None:
        """A benchmark without a prediction is still one; but it says why it has none."""
        missing = self._cannot_predict()
        if missing is None:
            try:
                prediction = learn(
                    self._subject, self.traces, self._asks, self._others, self._progress
                )
                self.results.more["theory"] = asdict(prediction)
            except ClientError as error:
                missing = str(error)
        if missing:
            self._progress.note(f"no prediction: {missing}")

    def _cannot_predict(self) -> str | None:
        """The reason; empty where nobody expects one, None where it can be done."""
        if not set(MODES) <= set(self._settings.modes):
            return ""
        if not self._settings.alone:
            return "theorem 7 is of one request at a time: --concurrency 1 comes first for it"
        if not self.traces.has_target:
            return f"the target keeps no trace ({self.traces.missing[0]})"
        if len(self._subject.drafts) != 1:
            return f"one draft that is reached from here is needed, not {len(self._subject.drafts)}"
        if self._subject.draft_infos[0]["kind"] == "head":
            return "a head cannot be timed alone: it reads the hidden states of its target"
        return None


def baseline_ask(server: OpenAIServer, settings: Settings) -> Ask:
    def ask(number: int, prompt: str) -> MeasuredRequest:
        content: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed + number,
        }
        if settings.ignore_eos:
            content["ignore_eos"] = True  # vLLM, SGLang and llama.cpp know it
        if settings.json_schema is not None:
            schema = {"name": "answer", "schema": json.loads(settings.json_schema)}
            content["response_format"] = {"type": "json_schema", "json_schema": schema}
        if settings.chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        return server.measure(number, content)

    return ask


def _title(key: RunKey, settings: Settings) -> str:
    unit = "requests/s" if settings.request_rate else "at a time"
    name = key.mode if key.mode in MODES else "baseline"
    return f"{key.repeat + 1}/{settings.repeats} {name}, {key.load:g} {unit}"
