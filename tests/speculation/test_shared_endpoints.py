"""Two targets on one draft, one target on two drafts, and what happens when one of them goes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_target.speculation.endpoint import LOAD_SECONDS
from tests.processes import TargetProcess, target, wait_until_idle, wait_until_ready
from tests.speculation.generations import (
    METRICS,
    SSD,
    Generations,
    LastingDraft,
    Pair,
    draft_info,
    endpoint,
    is_empty,
    is_up,
    looked_up,
    request,
    wait_for,
)

pytestmark = pytest.mark.services

MESSAGES = [request(seed) for seed in range(8)]


@dataclass
class Second:
    """Another target: on a draft of its own, and on that of the pair."""

    target: TargetProcess
    draft: LastingDraft


@pytest.fixture(scope="module")
def second(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    directory = tmp_path_factory.mktemp("second")
    with LastingDraft(directory / "draft", "--max-num-seqs", "16") as draft:
        flags = (*METRICS, "--draft", pair.draft.address, "--draft", draft.address)
        with target(directory / "target", *flags, "--no-auto-off", ready=False) as process:
            wait_until_ready(draft.process)
            wait_until_ready(process)
            both = (pair.draft.address, draft.address)
            wait_for(lambda: all(is_up(process, address) for address in both))
            yield Second(process, draft)


def followed(stats: list[pb.SpeculationStats]) -> int:
    """Rounds that a draft took part in: whether in time is a matter of the machine's pace."""
    return sum(map(looked_up, stats))


def held_at(server: TargetProcess, address: str) -> int:
    """Sequences of a target that one of its drafts follows."""
    found = endpoint(server, address)
    return 0 if found is None else found.open_sequences


def test_two_targets_share_a_draft(pair: Pair, second: Second) -> None:
    """Their sequences have the same numbers, and the same texts."""
    at_first = [
        request(seed, speculation={"mode": SSD, "endpoints": [pair.draft.address]})
        for seed in range(8)
    ]
    plain = pair.plain.of(at_first)
    with Generations(pair.target, at_first) as one, Generations(second.target, at_first) as two:
        wait_for(lambda: draft_info(pair.draft.process).open_sequences > 8 or not one.running)
        assert draft_info(pair.draft.process).links == 2
    assert one.texts() == two.texts() == plain
    assert followed(one.stats()) > 0
    assert followed(two.stats()) > 0
    wait_for(lambda: is_empty(pair.draft.process))


def test_sequences_of_a_target_are_spread_over_its_drafts(pair: Pair, second: Second) -> None:
    names = ("ssd_draft_rounds_total", "ssd_draft_branch_tokens_total")
    drafts = (pair.draft.process, second.draft.process)
    before = [draft.metrics() for draft in drafts]
    time.sleep(LOAD_SECONDS)  # until it is forgotten how busy one of them was a moment ago
    held: set[str] = set()
    with Generations(second.target, MESSAGES) as running:
        while running.running and len(held) < 2:
            for draft in drafts:
                if held_at(second.target, draft.address):
                    held.add(draft.address)
    assert running.texts() == pair.plain.of(MESSAGES)
    assert followed(running.stats()) > 0
    assert held == {draft.address for draft in drafts}
    for draft, old in zip(drafts, before, strict=True):
        for name in names:
            assert draft.metrics()[name] > old[name]
    wait_for(lambda: all(map(is_empty, drafts)))
    wait_until_idle(second.target)


def test_a_draft_that_leaves_hands_its_sequences_on(pair: Pair, second: Second) -> None:
    """It is told to go in the middle of eight generations: announced, drained, exit code 0."""
    leaving, stays = second.draft.process, pair.draft.address
    messages = [request(seed, 200) for seed in range(8)]  # for it takes a moment to go
    plain = pair.plain.of(messages)
    time.sleep(LOAD_SECONDS)  # until it is forgotten how busy one of them was a moment ago
    with Generations(second.target, messages) as running:
        running.until_each_has(8)
        assert held_at(second.target, leaving.address) > 0
        leaving.terminate()
        wait_for(lambda: held_at(second.target, stays) == 8 or running.running < 8)
        assert held_at(second.target, stays) == 8
        code = leaving.wait_for_exit()
    assert code == 0
    assert running.texts() == plain
    for each in running.stats():
        # Until the other one has it; none where the one that leaves was being waited for.
        assert each.fallbacks["leaving"] <= 2
        assert not each.fallbacks.keys() & {"disconnected", "lost", "stalled"}
    moved = [each for each in running.stats() if each.fallbacks["leaving"]]
    assert followed(moved or running.stats()) > 0
    assert "the endpoint leaves" in second.target.log()
    assert "drained" in leaving.log()
    assert "cut off" not in leaving.log()  # for the target has left by itself
    wait_for(lambda: is_empty(pair.draft.process))
    with Generations(second.target, MESSAGES) as after:
        pass
    assert after.texts() == pair.plain.of(MESSAGES)
    assert followed(after.stats()) > 0


def test_what_a_dying_target_held_is_freed(pair: Pair, second: Second) -> None:
    """And the other target does not notice."""
    draft = pair.draft.process
    messages = [request(seed, 400) for seed in range(8)]
    own = [request(seed, 60) for seed in range(4)]
    with pytest.raises(grpc.RpcError), Generations(second.target, messages) as running:
        running.until_each_has(5)
        wait_for(lambda: draft_info(draft).open_sequences >= 8)
        with Generations(pair.target, own) as beside:
            beside.until_each_has(5)
            second.target.kill()
    assert beside.texts() == pair.plain.of(own)
    assert not any(each.fallbacks["lost"] for each in beside.stats())
    wait_for(lambda: is_empty(draft), 20)
    assert draft_info(draft).links == 1
    ended = [v for k, v in draft.metrics().items() if k.startswith("ssd_draft_links_ended_total")]
    assert sum(ended) >= 1
    assert "integrity" not in draft.log()
