"""A target and its draft that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.processes import SHIPPED_DRAFT, target, wait_until_ready
from tests.speculation.generations import (
    METRICS,
    WAITS_2_SECONDS,
    LastingDraft,
    Pair,
    PlainTexts,
    wait_until_up,
)
from tests.suite.dealing import shared_services


@shared_services
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The target is patient: it makes use of what the draft says, however late that comes."""
    directory = tmp_path_factory.mktemp("pair")
    with LastingDraft(directory / "draft", "--max-num-seqs", "16") as draft:
        flags = [*METRICS, "--draft", draft.address, "--allow-draft", "127.0.0.1:*"]
        flags += ["--trust-draft", draft.address, "--draft-model", SHIPPED_DRAFT, *WAITS_2_SECONDS]
        with target(directory / "target", *flags, ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            wait_until_up(process, draft.address)
            yield Pair(process, draft, PlainTexts(process))
