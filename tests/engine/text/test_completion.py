"""A completion: its rules apply token by token, and what lies after its end does not exist."""

from collections.abc import Sequence

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


def test_the_text_of_a_stop_token_is_not_released() -> None:
    pieces, completion = completed([A, B, EOS])
    assert pieces == ["a", "b", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_token_id=EOS)
    assert completion.num_tokens == 3


def test_a_stop_token_releases_what_was_held_back() -> None:
    pieces, _ = completed([A, ST, EOS], strings=["STOP"])
    assert pieces == ["a", "", "ST"]
    pieces, _ = completed([A, EURO_1, EOS])
    assert pieces == ["a", "", "\ufffd"]


def test_a_token_that_is_no_stop_token_is_text() -> None:
    pieces, completion = completed([A, EOS, B], ids=[])
    assert pieces == ["a", "<end>", "b"]
    assert completion.finish is None


def test_a_stop_string_ends_it_without_its_text() -> None:
    pieces, completion = completed([A, ST, OP], strings=["STOP"])
    assert pieces == ["a", "", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_string="STOP")


def test_what_stops_it_may_be_a_part_of_its_text() -> None:
    pieces, completion = completed([A, EOS], include_stop=True)
    assert pieces == ["a", "<end>"]
    assert completion.finish == Finish(FinishReason.STOP, stop_token_id=EOS)
    pieces, completion = completed([A, ST, OP], strings=["STO"], include_stop=True)
    assert pieces == ["a", "ST", "O"]  # nothing is held back, nothing follows
    assert completion.finish == Finish(FinishReason.STOP, stop_string="STO")


def test_a_stop_token_that_spells_a_stop_string_is_there_as_a_whole() -> None:
    pieces, completion = completed([A, EURO_1, EOS], strings=["<e"], include_stop=True)
    assert pieces == ["a", "", "\ufffd<end>"]
    assert completion.finish == Finish(FinishReason.STOP, stop_token_id=EOS)


def test_max_tokens_ends_it_and_releases_what_was_held_back() -> None:
    pieces, completion = completed([A, ST], max_tokens=2, strings=["STOP"])
    assert pieces == ["a", "ST"]
    assert completion.finish == Finish(FinishReason.LENGTH)


def test_max_tokens_inside_a_character_leaves_a_replacement_character() -> None:
    pieces, completion = completed([A, EURO_1], max_tokens=2)
    assert pieces == ["a", "\ufffd"]
    assert completion.finish == Finish(FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [
        ([A, EOS], Finish(FinishReason.STOP, stop_token_id=EOS)),
        ([ST, OP], Finish(FinishReason.STOP, stop_string="STOP")),
    ],
)
def test_a_stop_at_the_last_token_that_is_allowed_is_a_stop(
    tokens: list[int], finish: Finish
) -> None:
    _, completion = completed(tokens, max_tokens=2, strings=["STOP"])
    assert completion.finish == finish


def test_a_stop_string_before_min_tokens_is_text() -> None:
    pieces, completion = completed([ST, OP, A, ST, OP], strings=["STOP"], min_tokens=3)
    assert pieces == ["", "STOP", "a", "", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_string="STOP")


def test_a_stop_string_counts_that_is_complete_with_the_last_of_min_tokens() -> None:
    pieces, completion = completed([A, ST, OP], strings=["STOP"], min_tokens=3)
    assert pieces == ["a", "", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_string="STOP")


def test_a_longer_stop_string_may_go_on_from_one_that_did_not_count() -> None:
    pieces, completion = completed([A, ST, OP, A], strings=["STOP", "aSTOPa"], min_tokens=4)
    assert pieces == ["", "", "", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_string="aSTOPa")


def test_a_stop_token_among_min_tokens_is_a_token_like_any_other() -> None:
    """The engine draws none; a resumed request may bring one."""
    pieces, completion = completed([A, EOS, EOS], min_tokens=2)
    assert pieces == ["a", "<end>", ""]
    assert completion.finish == Finish(FinishReason.STOP, stop_token_id=EOS)
    assert completion.num_tokens == 3


def test_one_token_can_be_all_there_is() -> None:
    assert completed([A], max_tokens=1)[0] == ["a"]
    assert completed([EOS], max_tokens=1)[1].finish == Finish(FinishReason.STOP, None, EOS)


def test_tokens_without_text_count() -> None:
    _, completion = completed([NOTHING] * 3, max_tokens=3)
    assert completion.finish == Finish(FinishReason.LENGTH)


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
