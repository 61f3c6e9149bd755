"""Has the runner watch the boundaries that somebody reads now."""

import logging
from collections.abc import Sequence

import torch

from ssd_target.engine.target_runner import TargetRunner
from ssd_target.speculation.coordinator import SpeculationCoordinator

log = logging.getLogger(__name__)


class FeatureWatch:
    def __init__(self, runner: TargetRunner, speculator: SpeculationCoordinator) -> None:
        self._runner, self._speculator = runner, speculator

    def follow(self) -> None:
        """Before a step. Without memory for it, everything goes on as before."""
        boundaries, before = self._speculator.boundaries, self._speculator.feed.watched
        if boundaries == before:
            return
        log.info("boundaries that are watched: %s", boundaries or "none")
        if self._watch(boundaries):
            self._speculator.watch(boundaries)
            return
        log.warning(
            "no memory to watch the boundaries %s: heads that read them draft without features "
            "while their links are up; give the KV cache less (--gpu-memory-utilization), or link "
            "fewer kinds of heads",
            ", ".join(map(str, boundaries)),
        )
        self._speculator.cannot_watch(boundaries)
        if not self._watch(before):
            self._watch(())
            self._speculator.watch(())

    def _watch(self, boundaries: Sequence[int]) -> bool:
        """False: there is no memory for it, and all that it had is free again."""
        try:
            self._runner.watch(boundaries)
            return True
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # here nothing holds what was made until then
        return False
