"""What happens to drafts meanwhile: killed, restarted, paused, and no longer listed."""

import random
import signal
import threading
from collections import Counter
from pathlib import Path

from tools.soak.services import Service, SoakFailed


class Chaos:
    """The first draft lives through it all, paused at times: what it leaves behind is measured.
    The others are killed and restarted, too."""

    def __init__(self, drafts: list[Service], listing: Path, every_s: float, seed: int) -> None:
        self._drafts, self._listing, self._every_s = drafts, listing, every_s
        self._draw = random.Random(seed)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="chaos")
        self._thread.start()

    def stop(self) -> None:
        """All drafts are up and listed afterwards."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        list_drafts(self._listing, self._drafts)

    def _run(self) -> None:
        acts = [(4, self._kill), (2, self._restart), (3, self._pause), (1, self._unlist)]
        while not self._stopping.wait(self._draw.uniform(0.5, 1.5) * self._every_s):
            (act,) = self._draw.choices([act for _, act in acts], [weight for weight, _ in acts])
            try:
                act()
            except (SoakFailed, OSError) as error:
                self.problems.append(f"{act.__name__}: {error}")

    def _victim(self) -> Service:
        return self._draw.choice(self._drafts[1:] or self._drafts)

    def _kill(self) -> None:
        draft = self._victim()
        draft.kill()
        self.counts["kills"] += 1
        self._stopping.wait(self._draw.uniform(0.0, 1.0))
        self._start(draft)

    def _restart(self) -> None:
        draft = self._victim()
        code = draft.stop()
        if code:
            raise SoakFailed(f"{draft.name} ended with {code}: {draft.log()}")
        self.counts["restarts"] += 1
        self._start(draft)

    def _start(self, draft: Service) -> None:
        draft.start()
        draft.wait_until_ready()

    def _pause(self) -> None:
        """Long enough for some to be given up, too."""
        draft = self._draw.choice(self._drafts)
        draft.signal(signal.SIGSTOP)
        try:
            self._stopping.wait(self._draw.choice((0.1, 0.5, 3.0)))
        finally:
            draft.signal(signal.SIGCONT)
        self.counts["pauses"] += 1

    def _unlist(self) -> None:
        """A pod that goes and comes back."""
        gone = self._draw.choice(self._drafts)
        list_drafts(self._listing, [draft for draft in self._drafts if draft is not gone])
        self._stopping.wait(self._draw.uniform(0.5, 3.0))
        list_drafts(self._listing, self._drafts)
        self.counts["unlisted"] += 1


def list_drafts(listing: Path, drafts: list[Service]) -> None:
    partial = listing.with_suffix(".new")
    partial.write_text("".join(f"{draft.address}\n" for draft in drafts))
    partial.replace(listing)
