"""A target and its draft that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.processes import SHIPPED_DRAFT, target, wait_until_ready
from tests.speculation.generations import METRICS, LastingDraft, Pair, PlainTexts, is_up, wait_for


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Speculation stays on whether it pays or not: on two busy cores it often does not."""
    directory = tmp_path_factory.mktemp("pair")
    with LastingDraft(directory / "draft", "--max-num-seqs", "16") as draft:
        flags = [*METRICS, "--draft", draft.address, "--allow-draft", "127.0.0.1:*"]
        flags += ["--draft-model", SHIPPED_DRAFT, "--no-auto-off"]
        with target(directory / "target", *flags, ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            wait_for(lambda: is_up(process, draft.address))
            yield Pair(process, draft, PlainTexts(process))
