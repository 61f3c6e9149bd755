"""Two targets on one draft, one target on two drafts, and what happens when one of them goes."""

from collections.abc import Iterator

import pytest

from tests.processes import TargetProcess, target, wait_until_ready
from tests.speculation.generations import (
    METRICS,
    SSD,
    WAITS_2_SECONDS,
    Generations,
    LastingDraft,
    Pair,
    draft_info,
    endpoint,
    from_endpoints,
    is_empty,
    request,
    wait_until_up,
)
from tests.waiting import wait_until

MESSAGES = [request(seed, 20) for seed in range(8)]


@pytest.fixture(scope="module")
def second(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Another target: on a draft of its own, and on that of the pair."""
    directory = tmp_path_factory.mktemp("second")
    with LastingDraft(directory / "draft", "--max-num-seqs", "16") as draft:
        flags = (*METRICS, "--draft", pair.draft.address, "--draft", draft.address)
        with target(directory / "target", *flags, *WAITS_2_SECONDS, ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            for address in (pair.draft.address, draft.address):
                wait_until_up(process, address)
            yield Pair(process, draft, pair.plain)


def held_at(server: TargetProcess, address: str) -> int:
    """Sequences of a target that one of its drafts follows."""
    found = endpoint(server, address)
    return 0 if found is None else found.open_sequences


def test_two_targets_share_a_draft(pair: Pair, second: Pair) -> None:
    """Their sequences have the same numbers, and the same texts."""
    at_first = [
        request(seed, 20, speculation={"mode": SSD, "endpoints": [pair.draft.address]})
        for seed in range(4)
    ]
    plain = pair.plain.of(at_first)
    draft = pair.draft.process
    with (
        pair.draft.standing_still(),  # until all are there
        Generations(pair.target, at_first) as one,
        Generations(second.target, at_first) as two,
    ):
        one.until_each_has(1)
        two.until_each_has(1)
        pair.draft.go_on()
        wait_until(lambda: draft_info(draft).open_sequences > 4 or not one.running)
        assert draft_info(draft).links == 2
    assert one.texts() == two.texts() == plain
    assert from_endpoints(one.stats()) > 0
    assert from_endpoints(two.stats()) > 0
    wait_until(lambda: is_empty(draft))


def test_a_draft_that_leaves_hands_its_sequences_on(pair: Pair, second: Pair) -> None:
    """It is told to go in the middle of eight generations: announced, drained, exit code 0.

    Both drafts stand still until then, so that none of the texts can end.
    """
    leaving = second.draft.process
    plain = pair.plain.of(MESSAGES)
    with (
        pair.draft.standing_still(),
        second.draft.standing_still(),
        Generations(second.target, MESSAGES) as running,
    ):
        running.until_each_has(1)
        assert held_at(second.target, leaving.address) > 0
        leaving.terminate()
        second.draft.go_on()
        code = leaving.wait_for_exit()
        pair.draft.go_on()
    assert code == 0
    assert running.texts() == plain
    for each in running.stats():
        # Until the other one has it; none where the one that leaves was being waited for.
        assert each.fallbacks["leaving"] <= 2
        assert not each.fallbacks.keys() & {"disconnected", "lost", "stalled"}
        assert from_endpoints([each]) > 0
    assert "the endpoint leaves" in second.target.log()
    assert "drained" in leaving.log()
    assert "cut off" not in leaving.log()  # for the target has left by itself
    wait_until(lambda: is_empty(pair.draft.process))
