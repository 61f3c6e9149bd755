"""A completion: its rules apply token by token, and what lies after its end does not exist."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.text.completion import Completion, Finish, FinishReason, StopRules
from tests.suite.scale import share

TABLE = [b"a", b"b", b"\xe2\x82", b"\xac", b"<end>", b"ST", b"OP", b""]
A, B, EURO_1, EURO_2, EOS, ST, OP, NOTHING = range(len(TABLE))


def completed(
    tokens: Sequence[int],
    max_tokens: int = 100,
    ids: Sequence[int] = (EOS,),
    strings: Sequence[str] = (),
    min_tokens: int = 0,
    include_stop: bool = False,
) -> tuple[list[str], Completion]:
    rules = StopRules(max_tokens, frozenset(ids), tuple(strings), min_tokens, include_stop)
    completion = Completion(rules, TABLE)
    return [completion.push(token) for token in tokens], completion


END = Finish(FinishReason.STOP, stop_token_id=EOS)
LENGTH = Finish(FinishReason.LENGTH)
HELD = {"strings": ["STOP"]}


def stopped(by: str) -> Finish:
    return Finish(FinishReason.STOP, stop_string=by)


@pytest.mark.parametrize(
    ("tokens", "rules", "pieces", "finish"),
    [
        # a stop token: its text is not released, what was held back is
        ([A, B, EOS], {}, ["a", "b", ""], END),
        ([EOS], {"max_tokens": 1}, [""], END),
        ([A, ST, EOS], HELD, ["a", "", "ST"], END),
        ([A, EURO_1, EOS], {}, ["a", "", "\ufffd"], END),
        ([A, EOS, B], {"ids": []}, ["a", "<end>", "b"], None),
        # a stop string ends it without its text
        ([A, ST, OP], HELD, ["a", "", ""], stopped("STOP")),
        # what stops it may be a part of its text: then nothing is held back, and nothing follows
        ([A, EOS], {"include_stop": True}, ["a", "<end>"], END),
        ([A, ST, OP], {"strings": ["STO"], "include_stop": True}, ["a", "ST", "O"], stopped("STO")),
        (
            [A, EURO_1, EOS],
            {"strings": ["<e"], "include_stop": True},
            ["a", "", "\ufffd<end>"],
            END,
        ),
        # max_tokens releases what was held back, and replaces half a character
        ([A], {"max_tokens": 1}, ["a"], LENGTH),
        ([A, ST], {**HELD, "max_tokens": 2}, ["a", "ST"], LENGTH),
        ([A, EURO_1], {"max_tokens": 2}, ["a", "\ufffd"], LENGTH),
        ([NOTHING] * 3, {"max_tokens": 3}, ["", "", ""], LENGTH),
        # a stop at the last token that is allowed is a stop
        ([A, EOS], {"max_tokens": 2}, ["a", ""], END),
        ([ST, OP], {**HELD, "max_tokens": 2}, ["", ""], stopped("STOP")),
        # among min_tokens a stop is text; it counts if it is complete with the last of them
        (
            [ST, OP, A, ST, OP],
            {**HELD, "min_tokens": 3},
            ["", "STOP", "a", "", ""],
            stopped("STOP"),
        ),
        ([A, ST, OP], {**HELD, "min_tokens": 3}, ["a", "", ""], stopped("STOP")),
        ([A, EOS, EOS], {"min_tokens": 2}, ["a", "<end>", ""], END),
        # and a longer one may go on from one that did not count
        (
            [A, ST, OP, A],
            {"strings": ["STOP", "aSTOPa"], "min_tokens": 4},
            [""] * 4,
            stopped("aSTOPa"),
        ),
    ],
)
def test_what_each_token_releases_and_what_ends_it(
    tokens: list[int], rules: dict[str, Any], pieces: list[str], finish: Finish | None
) -> None:
    released, completion = completed(tokens, **rules)
    assert released == pieces
    assert completion.finish == finish
    assert completion.num_tokens == len(tokens)


@pytest.mark.parametrize("tokens", [[EOS], [ST, OP], [A, B, A]])
def test_a_token_after_the_finish_is_an_error(tokens: list[int]) -> None:
    _, completion = completed(tokens, max_tokens=3, strings=["STOP"])
    before = (completion.finish, completion.num_tokens)
    with pytest.raises(RuntimeError, match="after the finish"):
        completion.push(A)
    assert (completion.finish, completion.num_tokens) == before


@given(
    st.lists(st.integers(0, len(TABLE) - 1), max_size=14),
    st.integers(1, 12),
    st.sets(st.sampled_from([EOS, B]), max_size=2),
    st.lists(st.sampled_from(["STOP", "a€", "€", "ST", "ba"]), max_size=2),
    st.integers(0, 6),
    st.booleans(),
)
@settings(max_examples=share(4000), derandomize=True, deadline=None)
def test_a_completion_is_a_function_of_its_tokens(
    tokens: list[int],
    max_tokens: int,
    ids: set[int],
    strings: list[str],
    min_tokens: int,
    include: bool,
) -> None:
    """Against rules applied to the whole; and resumed after every token."""

    def fresh() -> Completion:
        rules = StopRules(max_tokens, frozenset(ids), tuple(strings), min_tokens, include)
        return Completion(rules, TABLE)

    count, text, finish = reference(tokens, max_tokens, ids, strings, min_tokens, include)
    tokens = tokens[:count]
    for n in range(count + 1):
        first, second = fresh(), fresh()
        before = "".join([first.push(token) for token in tokens[:n]])
        for token in tokens[:n]:
            second.push(token)
        assert (second.finish is not None) == (n == count and finish is not None)
        rest = "".join([second.push(token) for token in tokens[n:]])
        assert finish is None or before + rest == text
        assert (second.finish, second.num_tokens) == (finish, count)


def reference(
    tokens: list[int],
    max_tokens: int,
    ids: set[int],
    strings: list[str],
    min_tokens: int,
    include: bool,
) -> tuple[int, str, Finish | None]:
    """Tokens that count, their text and why they end; looked for after each token."""
    data = b""
    for n, token in enumerate(tokens, start=1):
        if token in ids and n > min_tokens:
            text = (data + TABLE[token] * include).decode(errors="replace")
            return n, text, Finish(FinishReason.STOP, stop_token_id=token)
        before, data = len(data), data + TABLE[token]
        stops = [(s.encode(), max(0, before + 1 - len(s.encode()))) for s in strings]
        found = [
            (data.find(s, begin), i) for i, (s, begin) in enumerate(stops) if s in data[begin:]
        ]
        if found and n >= min_tokens:
            place, which = min(found)
            finish = Finish(FinishReason.STOP, stop_string=strings[which])
            end = place + include * len(strings[which].encode())
            return n, data[:end].decode(errors="replace"), finish
        if n == max_tokens:
            return n, data.decode(errors="replace"), Finish(FinishReason.LENGTH)
    return len(tokens), "", None
