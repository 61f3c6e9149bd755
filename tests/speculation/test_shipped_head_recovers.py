"""The head that ships is as good as before after a restart in mid-text, and after prefix hits.

Its guesses depend on all that it has read, unlike those of the head in ``test_heads_recover.py``.
Rounds over one span of the same texts are compared, with nothing wrong and after the event; a few
rounds of one text would tell little, so several texts are added up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from tests.harness import Request, make_core, run
from tests.simulation import SimulatedDraft, Simulation
from tests.speculation.scenarios import Pair, stories_with_head
from tests.speculation.test_heads_recover import DEPTH, NEARLY, Lengths
from tests.suite.scale import FULL

HEROES = (
    "a shy lamb",
    "an old bear",
    "two friends who bake bread",
    "a boat",
    "the moon",
    "a snail",
)
TEXTS = len(HEROES) if FULL else 3
BEGUN, SPAN = 112, 64  # tokens of a text that is known before, and that are measured
LAST = 5  # tokens of what is known that are new to the second wave
RESTART_AT = 40  # tokens of the text: what is measured comes after
SSD = SpeculationRequest(Mode.SSD, depth=DEPTH)


@dataclass
class Stories:
    pair: Pair
    texts: list[list[int]]  # prompt, and BEGUN tokens of its story
    stories: list[list[int]]  # the next SPAN tokens of each, by plain decoding
    usual: float  # tokens that are right in a round over them

    def request(self, i: int) -> Request:
        return Request(self.texts[i], max_tokens=SPAN, speculation=SSD)


@pytest.fixture(scope="module")
def stories() -> Iterator[Stories]:
    with torch.backends.mkldnn.flags(enabled=False):  # as in the services
        pair = stories_with_head()
        both = [_plain(pair, prompt, BEGUN + SPAN) for prompt in _prompts()]
        texts = [prompt + story[:BEGUN] for prompt, story in zip(_prompts(), both, strict=True)]
        made = Stories(pair, texts, [story[BEGUN:] for story in both], 0.0)
        made.usual = accepted(made, lambda simulation, i: None)
        yield made


def _prompts() -> list[list[int]]:
    directory = resolve_model("stories-target")
    tokenizer = Tokenizer(directory, load_model_config(directory))
    chats = [f"Tell me a story about {each}." for each in HEROES[:TEXTS]]
    return [tokenizer.encode_chat([{"role": "user", "content": chat}]) for chat in chats]


def _plain(pair: Pair, prompt: list[int], tokens: int) -> list[int]:
    return run(make_core(pair.target), [Request(prompt, max_tokens=tokens)])[0].tokens


def simulation_of(pair: Pair, keep: int) -> Simulation:
    """The draft has the time that it needs."""
    options = SpeculationOptions(
        depth=DEPTH,
        adapt_depth=False,
        backup=Backup.JUST_IN_TIME,
        wait_seconds=1.0,
        auto_off=False,
    )
    head = pair.drafts[0]
    return Simulation(pair.target, head, options, draft_steps=(12, 12), keep_features=keep)


def accepted(stories: Stories, before: Callable[[Simulation, int], object], keep: int = 0) -> float:
    """Tokens of a round that were right, over the span of all texts."""
    rounds = tokens = 0
    for i, story in enumerate(stories.stories):
        simulation = simulation_of(stories.pair, keep)
        before(simulation, i)
        lengths = Lengths(simulation)
        [result] = run(simulation.core, [stories.request(i)])
        assert result.tokens == story
        assert simulation.speculator.feed.counters.missed == 0
        more_rounds, more_tokens = lengths.since()
        rounds, tokens = rounds + more_rounds, tokens + more_tokens
    return _in_a_round(rounds, tokens)


def _in_a_round(rounds: int, tokens: int) -> float:
    print(f"{tokens} tokens were right in {rounds} rounds")
    assert rounds > 10 * TEXTS
    return tokens / rounds


def restart(simulation: Simulation, draft: SimulatedDraft) -> None:
    """It forgets everything, and is back at once."""
    simulation._lose(draft)
    draft.core, draft.down_for = draft.make(), 1


@pytest.mark.parametrize("restarted", [False, True], ids=["cached on both sides", "restarted"])
@pytest.mark.parametrize("keep", [0, 1 << 24], ids=["nothing kept", "kept"])
def test_after_a_prefix_hit(stories: Stories, keep: int, restarted: bool) -> None:
    """Most of the text is in the target's prefix cache."""
    reread = []

    def before(simulation: Simulation, i: int) -> None:
        begun = Request(stories.texts[i][:-LAST], max_tokens=2, speculation=SSD)
        run(simulation.core, [begun])
        if restarted:
            draft = simulation.drafts[0]
            restart(simulation, draft)
            simulation._reconnect(draft)
        reread.append(simulation.speculator.feed.counters)

    assert accepted(stories, before, keep) >= NEARLY * stories.usual
    if restarted:
        assert all((counters.reread == 0) == bool(keep) for counters in reread)


def test_after_a_restart_in_the_middle_of_a_text(stories: Stories) -> None:
    """The story from its beginning: the restart comes before the span that is measured."""
    rounds = tokens = 0
    for text, story in zip(stories.texts, stories.stories, strict=True):
        simulation = simulation_of(stories.pair, 0)
        prompt = text[:-BEGUN]
        lengths = _measured_from(simulation, len(text), RESTART_AT + len(prompt))
        whole = Request(prompt, max_tokens=BEGUN + SPAN, speculation=SSD)
        [result] = run(simulation.core, [whole])
        assert result.tokens[BEGUN:] == story
        assert simulation.drafts[0].epoch == 2
        assert simulation.speculator.feed.counters.missed == 0
        more_rounds, more_tokens = lengths[0].since()
        rounds, tokens = rounds + more_rounds, tokens + more_tokens
    assert _in_a_round(rounds, tokens) >= NEARLY * stories.usual


def _measured_from(simulation: Simulation, begin: int, restart_at: int) -> list[Lengths]:
    """The draft is restarted when so many tokens are committed; what follows ``begin`` is measured
    by the one that is returned in the list."""
    lengths: list[Lengths] = []
    misbehave, draft = simulation._misbehave, simulation.drafts[0]

    def count() -> None:
        committed = [s.sequence.num_committed for s in simulation.speculator._sequences.values()]
        if draft.epoch == 1 and draft.up and max(committed, default=0) >= restart_at:
            restart(simulation, draft)
        if not lengths and max(committed, default=0) >= begin:
            lengths.append(Lengths(simulation))
        misbehave()

    simulation._misbehave = count  # type: ignore[method-assign]
    return lengths
