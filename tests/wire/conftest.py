"""A target and its draft that the tests of this folder attack; their books are checked."""

from collections.abc import Iterator

import pytest

from tests.processes import target, wait_until_ready
from tests.speculation.generations import METRICS, LastingDraft, Pair, PlainTexts, is_up
from tests.suite.dealing import shared_services
from tests.waiting import wait_until

OPEN = ("--reflection", "--trace-events", "500")


@shared_services
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("victims")
    """It waits long for those who read slowly; what it keeps for them is bounded."""
    slow = ("--link-write-timeout", "2")
    with LastingDraft(directory / "draft", *OPEN, *slow, "--max-num-seqs", "16") as draft:
        flags = [*METRICS, *OPEN, "--draft", draft.address, "--allow-draft", "127.0.0.1:*"]
        flags += ["--no-auto-off", "--write-timeout", "600", "--max-backlog-kib", "64"]
        with target(directory / "target", *flags, ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            wait_until(lambda: is_up(process, draft.address))
            yield Pair(process, draft, PlainTexts(process))
