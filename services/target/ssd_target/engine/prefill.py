"""The prefill forward of a step: pieces of prompts, and the first token after each."""

import time

import numpy as np

from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.engine.committer import RoundCommitter
from ssd_target.engine.prompt_scoring import PromptScoring
from ssd_target.engine.target_runner import TargetRunner
from ssd_target.records.engine_records import Delta
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.verifier import draws
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator


class PrefillForward:
    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        speculator: SpeculationCoordinator,
        committer: RoundCommitter,
        trace: Trace,
    ) -> None:
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._committer, self._trace = committer, trace

    def run(self, works: list[Work]) -> list[Delta]:
        if not works:
            return []
        for work in works:
            if not self._scheduler.works.replays(work.sequence):
                self._speculator.begin(work.sequence)
        begin, started = self._trace.now(), time.monotonic()
        flush = self._speculator.endpoints.flush
        scoring = PromptScoring(works)
        logits = self._runner.forward([work.chunk for work in works], flush, scoring.take)
        deltas = self._tell_scores(scoring)
        for work in works:
            if not work.chunk.num_logits and not work.is_over:
                self._scheduler.advance(work, 0, [])
        ending = [work for work in works if work.chunk.num_logits]
        if ending:
            deltas += self._committer.end_rounds(ending, self._runner.draw(logits, draws(ending)))
        if self._speculator.reads_features and self._runner.features is not None:
            self._speculator.tell_features(works, self._runner.features)
        width = sum(len(work.chunk.tokens) for work in works)
        self._trace.span(TraceEventKind.PREFILL, begin, self._trace.now(), rows=width)
        if self._scheduler.kept is not None and ending:  # else nobody has waited for it
            self._scheduler.kept.prefilled(width, time.monotonic() - started)
        return deltas

    def _tell_scores(self, scoring: PromptScoring) -> list[Delta]:
        """Log probabilities of prompts, where they are asked for."""
        deltas = []
        for work, lines in scoring.results():
            sequence = work.sequence
            if np.isnan(lines[:, 0].view(np.float32)).any():
                deltas.append(self._committer.fail(sequence))
                continue
            deltas.append(
                Delta(
                    sequence.id,
                    [],
                    None,
                    sequence.num_cached_tokens,
                    finished=False,
                    prompt_scores=lines.tobytes(),
                )
            )
        return deltas
