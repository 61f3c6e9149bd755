"""Statistics: what is counted, how the line reads, what the JSON holds."""

import json

import pytest

from ssd.v1 import target_pb2
from ssd_client.generate.events import (
    Finished,
    FinishReason,
    Moved,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.speculation import SpeculationStats, served_otherwise, stats_of
from ssd_client.terminal.render import (
    duration,
    endpoint_text,
    move_text,
    result_json,
    speculation_line,
    statistics,
)


def started(endpoint="a:1", seed=123):
    return Started(endpoint, "r", seed, 4, "model")


def finished(tokens, reason=FinishReason.STOP, stopped_by=None, speculation=None):
    return Finished(reason, stopped_by, Usage(4, tokens, 1), 123, speculation)


def result_of(*timed_events):
    result = GenerationResult(Timing(sent=10.0))
    for now, event in timed_events:
        result.add(event, now)
    return result


def test_the_line_of_a_plain_generation():
    result = result_of(
        (10.01, started()),
        (10.041, Tokens((1,), "a")),
        (10.541, Tokens((2, 3), "b")),
        (11.041, Tokens((4, 5), "cd")),
        (11.1, finished(5)),
    )
    assert " · ".join(statistics(result)) == (
        "5 tokens · first after 41 ms · 4.0 tokens/s · stop · seed 123"
    )
    assert result.text == "abcd"


def test_the_line_says_how_often_it_resumed():
    events = [(11, started()), (12, Tokens((1,), "")), (13, started("b:2"))]
    assert statistics(result_of(*events))[-1] == "resumed once"
    events += [(14, Tokens((2,), "")), (15, started("a:1"))]
    assert statistics(result_of(*events))[-1] == "resumed 2 times"
    # One that is lost before the first token is no resume.
    result = result_of((11, started()), (12, started("b:2", seed=5)), (13, Tokens((1,), "")))
    assert statistics(result) == ["1 token", "first after 3.00 s", "unfinished", "seed 5"]


@pytest.mark.parametrize("ids", [(1,), (1, 2)])
def test_tokens_that_come_at_once_have_no_rate(ids):
    result = result_of((11, started()), (12, Tokens(ids, "a")), (12, finished(len(ids))))
    timing = {"ttft_ms": 2000.0, "tokens_per_s": None, "total_ms": 2000.0}
    assert result_json(result, logprobs=False)["timing"] == timing


def test_json_of_a_finished_generation():
    result = result_of(
        (10.5, started()),
        (11.0, Tokens((1,), "é", (TokenLogprobs(1, -0.5, ((1, -0.5), (2, float("-inf")))),))),
        (12.0, Tokens((2,), "!", (TokenLogprobs(2, -1.0),))),
        (12.5, finished(2, stopped_by="END")),
    )
    content = result_json(result, logprobs=True)
    assert json.loads(json.dumps(content, allow_nan=False)) == {
        "text": "é!",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "stopped_by": "END",
        "seed": 123,
        "usage": {"prompt_tokens": 4, "completion_tokens": 2, "cached_prompt_tokens": 1},
        "timing": {"ttft_ms": 1000.0, "tokens_per_s": 1.0, "total_ms": 2500.0},
        "speculation": None,
        "logprobs": [
            {
                "token_id": 1,
                "logprob": -0.5,
                "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": None}],
            },
            {"token_id": 2, "logprob": -1.0, "top": []},
        ],
        "endpoints": ["a:1"],
        "resumed": 0,
    }


def line_of(stats, tokens):
    """The speculation line of a generation of so many tokens."""
    events = [(11, started()), (12, Tokens(tuple(range(tokens)), "a"))]
    return speculation_line(result_of(*events, (13, finished(tokens, speculation=stats))))


def test_the_line_of_a_speculative_generation():
    stats = SpeculationStats(
        mode="ssd",
        rounds=61,
        hits=48,
        late=3,
        length_misses=5,
        token_misses=2,
        cache_rounds=50,
        drafted_tokens=216,
        accepted_tokens=171,
        cache_tokens=160,
        fallbacks={"busy": 1, "disconnected": 4},
    )
    assert line_of(stats, 232) == (
        "speculation: 61 rounds · 3.8 tokens/round · 160 of 232 tokens from the cache · "
        "hit rate 83 % · acceptance 79 % · 3 late · 7 missed (5 length, 2 token) · "
        "fallbacks: disconnected 4, busy 1"
    )


def test_the_line_says_only_what_there_is():
    alone = SpeculationStats(mode="ssd", rounds=1, plain_rounds=1)
    assert line_of(alone, 1) == (
        "speculation: 1 round · 1.0 tokens/round · 0 of 1 token from the cache"
    )
    sync = SpeculationStats(mode="sync", rounds=2, drafted_tokens=8, accepted_tokens=6)
    assert line_of(sync, 8) == "speculation: 2 rounds · 4.0 tokens/round · acceptance 75 %"


@pytest.mark.parametrize(
    "stats", [None, SpeculationStats(mode="off", rounds=5), SpeculationStats(mode="ssd")]
)
def test_no_speculation_has_no_line(stats):
    assert line_of(stats, 5) == ""


def test_the_reason_of_a_fallback_stays_on_its_line():
    stats = SpeculationStats(mode="ssd", rounds=1, fallbacks={"a\n\x1b[2Jb": 1})
    assert line_of(stats, 1).endswith(" · fallbacks: a �[2Jb 1")


def test_statistics_are_read_field_for_field():
    fields = target_pb2.SpeculationStats.DESCRIPTOR.fields
    message = target_pb2.SpeculationStats(
        mode=2,
        verification=2,
        drafted_per_position=[5, 4],
        accepted_per_position=[4, 1],
        fallbacks={"busy": 3},
    )
    said = ("mode", "verification", "drafted_per_position", "accepted_per_position", "fallbacks")
    counts = [each for each in fields if each.name not in said]
    for each in counts:
        setattr(message, each.name, each.number)
    stats = stats_of(message)
    assert (stats.mode, stats.verification, stats.fallbacks) == ("sync", "rejection", {"busy": 3})
    assert (stats.drafted_per_position, stats.accepted_per_position) == ((5, 4), (4, 1))
    assert [getattr(stats, each.name) for each in counts] == [each.number for each in counts]


def test_a_newer_servers_mode_is_unknown():
    assert stats_of(target_pb2.SpeculationStats(mode=77)).mode == "unknown"


def test_the_parts_of_a_generation_are_added_up():
    first = SpeculationStats(
        "ssd", "rejection", 2, 1, 1, accepted_per_position=(2, 1),
        fallbacks={"busy": 1, "late": 2},
    )  # fmt: skip
    second = SpeculationStats(
        "ssd", "coupled", 4, 3, wait_micros=7, accepted_per_position=(4,), fallbacks={"busy": 5}
    )
    both = SpeculationStats(
        "ssd", "coupled", 6, 4, 1, wait_micros=7, accepted_per_position=(6, 1),
        fallbacks={"busy": 6, "late": 2},
    )  # fmt: skip
    assert first + second == both
    result = result_of(
        (11, started()),
        (12, Tokens((1, 2, 3), "a")),
        (13, finished(3, speculation=first)),
        (14, started("b:2")),
        (15, Tokens((4, 5), "b")),
        (16, finished(5, speculation=second)),
    )
    assert (result.speculation, result.speculation_tokens) == (both, 5)


def test_a_part_without_statistics_adds_no_tokens():
    result = result_of(
        (11, started()),
        (12, Tokens((1, 2, 3), "a")),
        (13, started("b:2")),
        (14, Tokens((4, 5), "b")),
        (15, finished(5, speculation=SpeculationStats(mode="ssd", rounds=1))),
    )
    assert result_json(result, logprobs=False)["speculation"]["tokens"] == 2
    assert speculation_line(result).startswith("speculation after the resume: 1 round · 2.0 ")


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({}, "h:1 up"),
        ({"draft_name": "tiny", "open_sequences": 1}, "h:1 up (tiny, 1 sequence)"),
        ({"reason": "no answer"}, "h:1 up (no answer)"),
        ({"source": "dns:///d:1", "draft_name": "tiny"}, "h:1 of dns:///d:1 up (tiny)"),
    ],
)
def test_what_an_endpoint_is_called(told, text):
    endpoint = {"address": "h:1", "state": "up", "draft_name": "", "reason": ""}
    assert endpoint_text({**endpoint, "open_sequences": 0, **told}) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0412, "41 ms"), (0.9999, "1.00 s"), (12.345, "12.35 s")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        (Moved("a:1", "b:2", 57, False, 0, "x"), "a:1 lost after 57 tokens, resuming on b:2"),
        (Moved("a:1", "b:2", 0, False, 0, "a:1: no"), "a:1: no, trying b:2"),
        (Moved("a:1", "a:1", 0, True, 2.0, "x"), "a:1 is full, trying a:1 in 2.00 s"),
    ],
)
def test_what_a_move_is_called(moved, text):
    assert move_text(moved) == text


@pytest.mark.parametrize(
    ("mode", "verification", "stats", "said"),
    [
        (None, None, {"plain_rounds": 4}, ""),
        ("off", None, {"plain_rounds": 4}, ""),
        ("ssd", None, {"hits": 1, "plain_rounds": 3}, ""),
        ("ssd", None, {"token_misses": 1, "plain_rounds": 3}, ""),
        ("ssd", None, {"sync_rounds": 4}, "ssd as sync"),
        ("ssd", None, {"plain_rounds": 4}, "ssd as off"),
        ("sync", None, {"plain_rounds": 4}, "sync as off"),
        ("sync", None, {"sync_rounds": 1, "plain_rounds": 3}, ""),
        (None, "rejection", {"hits": 4, "drafted_tokens": 9}, "rejection as coupled"),
        (None, "rejection", {"drafted_tokens": 9, "rejection_rounds": 4}, ""),
        ("ssd", "rejection", {"sync_rounds": 4, "drafted_tokens": 9},
         "ssd as sync, rejection as coupled"),
    ],
)  # fmt: skip
def test_what_was_served_otherwise_than_asked_is_said(mode, verification, stats, said):
    line = served_otherwise(mode, verification, SpeculationStats(rounds=4, **stats))
    assert line == (f"served otherwise than asked: {said}" if said else "")
