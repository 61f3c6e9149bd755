"""Has the runner watch the boundaries that somebody reads now."""

import logging
from collections.abc import Sequence

import torch

from ssd_target.engine.target_runner import TargetRunner
from ssd_target.speculation.coordinator import SpeculationCoordinator

log = logging.getLogger(__name__)


class FeatureWatch:
    """A watch begins when all graphs are captured that it needs: before each step, one is."""

    def __init__(self, runner: TargetRunner, speculator: SpeculationCoordinator) -> None:
        self._runner, self._speculator = runner, speculator
        self.is_behind = False  # some are left to capture

    def catch_up(self) -> None:
        """At a start, when nobody waits."""
        self.follow()
        while self.is_behind:
            self.follow()

    def follow(self) -> None:
        """Before a step. Without memory for it, everything goes on as before."""
        boundaries, before = self._speculator.boundaries, self._speculator.feed.watched
        self.is_behind = False
        if boundaries == before:
            return
        self._speculator.prepare_watch(boundaries)
        watched = self._watch(boundaries)
        if watched is None:
            self._give_up(boundaries, before)
            return
        self.is_behind = not watched
        if watched:
            log.info("boundaries that are watched: %s", boundaries or "none")
            self._speculator.watch(boundaries)

    def _give_up(self, boundaries: tuple[int, ...], before: tuple[int, ...]) -> None:
        log.warning(
            "no memory to watch the boundaries %s: heads that read them draft without features "
            "while their links are up; give the KV cache less (--gpu-memory-utilization), or link "
            "fewer kinds of heads",
            ", ".join(map(str, boundaries)),
        )
        self._speculator.cannot_watch(boundaries)
        while (watched := self._watch(before)) is False:
            pass
        if watched is None:
            self._watch(())
            self._speculator.watch(())

    def _watch(self, boundaries: Sequence[int]) -> bool | None:
        """False: something is left to capture. None: there is no memory for it, and all that it had
        is free again."""
        try:
            if not self._runner.prepare_watch(boundaries):
                return False
            self._runner.watch(boundaries)
            return True
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # here nothing holds what was made until then
        return None
