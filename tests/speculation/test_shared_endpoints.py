"""Two targets on one draft, one target on two drafts, and what happens when one of them goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import pytest

from tests.processes import TargetProcess, target, wait_until_idle, wait_until_ready
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
    generate_from_cache,
    is_empty,
    request,
    wait_until_up,
)
from tests.waiting import wait_until

MESSAGES = [request(seed, 40) for seed in range(8)]


@dataclass
class Second:
    """Another target: on a draft of its own, and on that of the pair."""

    target: TargetProcess
    draft: LastingDraft

    @contextmanager
    def standing_still(self, pair: Pair) -> Iterator[None]:
        """Both drafts of the target, so that its texts wait after their first tokens."""
        with pair.draft.standing_still(), self.draft.standing_still():
            yield


@pytest.fixture(scope="module")
def second(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    directory = tmp_path_factory.mktemp("second")
    with LastingDraft(directory / "draft", "--max-num-seqs", "16") as draft:
        flags = (*METRICS, "--draft", pair.draft.address, "--draft", draft.address)
        with target(directory / "target", *flags, *WAITS_2_SECONDS, ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            for address in (pair.draft.address, draft.address):
                wait_until_up(process, address)
            yield Second(process, draft)


def held_at(server: TargetProcess, address: str) -> int:
    """Sequences of a target that one of its drafts follows."""
    found = endpoint(server, address)
    return 0 if found is None else found.open_sequences


def test_two_targets_share_a_draft(pair: Pair, second: Second) -> None:
    """Their sequences have the same numbers, and the same texts."""
    at_first = [
        request(seed, speculation={"mode": SSD, "endpoints": [pair.draft.address]})
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
    generate_from_cache(second.target, at_first, pair.plain)
    wait_until(lambda: is_empty(draft))


def test_sequences_of_a_target_are_spread_over_its_drafts(pair: Pair, second: Second) -> None:
    names = ("ssd_draft_rounds_total", "ssd_draft_branch_tokens_total")
    drafts = (pair.draft, second.draft)
    before = [draft.process.metrics() for draft in drafts]
    with second.standing_still(pair), Generations(second.target, MESSAGES) as running:
        running.until_each_has(1)
        held = [held_at(second.target, draft.address) for draft in drafts]
        for draft in drafts:
            draft.go_on()
    assert sum(held) == len(MESSAGES)
    assert min(held) > 0
    assert running.texts() == pair.plain.of(MESSAGES)
    assert from_endpoints(running.stats()) > 0
    for draft, old in zip(drafts, before, strict=True):
        for name in names:
            assert draft.process.metrics()[name] > old[name]
    generate_from_cache(second.target, MESSAGES, pair.plain)
    wait_until(lambda: all(is_empty(draft.process) for draft in drafts))
    wait_until_idle(second.target)


def test_a_draft_that_leaves_hands_its_sequences_on(pair: Pair, second: Second) -> None:
    """It is told to go in the middle of eight generations: announced, drained, exit code 0.

    Both drafts stand still until then, so that none of the texts can end.
    """
    leaving = second.draft.process
    plain = pair.plain.of(MESSAGES)
    with second.standing_still(pair), Generations(second.target, MESSAGES) as running:
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
    generate_from_cache(second.target, MESSAGES, pair.plain)


def test_what_a_dying_target_held_is_freed(pair: Pair, second: Second) -> None:
    """And the other target does not notice."""
    draft = pair.draft.process
    own = MESSAGES[:4]
    plain = pair.plain.of(own)
    with (
        pytest.raises(grpc.RpcError),
        pair.draft.standing_still(),
        Generations(second.target, MESSAGES) as running,
    ):
        running.until_each_has(1)
        assert held_at(second.target, pair.draft.address) >= 4
        with Generations(pair.target, own) as beside:
            beside.until_each_has(1)
            second.target.kill()
            pair.draft.go_on()
    assert beside.texts() == plain
    assert from_endpoints(beside.stats()) > 0
    assert not any(each.fallbacks["lost"] for each in beside.stats())
    wait_until(lambda: is_empty(draft))
    assert draft_info(draft).links == 1
    ended = [v for k, v in draft.metrics().items() if k.startswith("ssd_draft_links_ended_total")]
    assert sum(ended) >= 1
    assert "integrity" not in draft.log()
