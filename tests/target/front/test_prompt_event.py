"""The prompt comes back as the model read it, in one event or several."""

import numpy as np
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.token_ids import unpack_tokens
from ssd_engine.text.tokenizer import Tokenizer
from ssd_target.front.prompt_event import MAX_TOKENS, SCORED_TOKENS, PromptEvents

TEXT = "<|user|>Zoë said: 東京 🙂<|story|>"
NO_TOKEN = -1
TABLE = [b"<|bos|>", b"a", b"\xe2\x82", b"\xac", b" b"]
BOS, A, EURO_1, EURO_2, B = range(len(TABLE))


def merged(events: list[pb.GenerateResponse]) -> pb.GeneratePrompt:
    whole = pb.GeneratePrompt()
    for event in events:
        assert len(event.prompt.text.encode()) == sum(event.prompt.text_lengths)
        assert len(event.prompt.text_lengths) == len(event.prompt.token_ids) // 4
        whole.token_ids += event.prompt.token_ids
        whole.text += event.prompt.text
        whole.text_lengths.extend(event.prompt.text_lengths)
        whole.logprobs.extend(event.prompt.logprobs)
    return whole


def events_of(tokenizer: Tokenizer, prompt: list[int]) -> PromptEvents:
    return PromptEvents(tokenizer.spelled_bytes, prompt)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_control_tokens_are_spelled_and_characters_stay_whole(
    tokenizer: Tokenizer, count: int
) -> None:
    """But for one within which a prompt ends."""
    prompt = tokenizer.encode(TEXT)
    events = events_of(tokenizer, prompt)
    whole = merged([events.event(count) for _ in range(0, len(prompt), count)])
    assert unpack_tokens(whole.token_ids) == prompt
    assert whole.text.endswith(TEXT)
    assert not whole.logprobs
    cut = tokenizer.encode("🙂")[:-1]
    assert events_of(tokenizer, cut).event(len(cut)).prompt.text.endswith("\ufffd")


def test_long_prompts_come_in_several_events(tokenizer: Tokenizer) -> None:
    """The first token has no log probabilities, every other its own."""
    prompt = tokenizer.encode("story " * 2 * SCORED_TOKENS)
    count = len(prompt) - 1
    lines = np.full((count, 5), NO_TOKEN, dtype=np.int32)
    lines[:, 0] = (-np.arange(count, dtype=np.float32)).view(np.int32)
    lines[:, 1], lines[:, 3] = prompt[1:], lines[:, 0]
    events = events_of(tokenizer, prompt)
    told = [events.first(), *events.scored(lines.tobytes(), 2)]
    assert len(told) > 3
    whole = merged(told)
    assert unpack_tokens(whole.token_ids) == prompt
    assert whole.logprobs[0] == pb.TokenLogprobs()
    for i, value in enumerate(whole.logprobs[1:]):
        assert value.chosen == -i
        assert [(each.token_id, each.logprob) for each in value.top] == [(prompt[i + 1], -i)]


def test_each_token_has_its_text() -> None:
    (event,) = PromptEvents(TABLE, [BOS, A, EURO_1, EURO_2, B]).unscored()
    assert unpack_tokens(event.prompt.token_ids) == [BOS, A, EURO_1, EURO_2, B]
    assert event.prompt.text == "<|bos|>a€ b"
    assert list(event.prompt.text_lengths) == [7, 1, 0, 3, 2]
    assert not event.prompt.logprobs


@pytest.mark.parametrize("more", [-1, 0, 1, MAX_TOKENS + 2])
def test_a_long_prompt_comes_in_pieces(more: int) -> None:
    """A character may lie on both sides of a cut."""
    prompt = [A] * (MAX_TOKENS - 1) + [EURO_1, EURO_2] + [B] * (MAX_TOKENS + 1)
    prompt = prompt[: MAX_TOKENS + more]
    events = list(PromptEvents(TABLE, prompt).unscored())
    assert len(events) == -(-len(prompt) // MAX_TOKENS)
    whole = merged(events)
    assert unpack_tokens(whole.token_ids) == prompt
    assert whole.text == b"".join(TABLE[token] for token in prompt).decode(errors="replace")
