"""Text out of tokens: whole characters, nothing of a stop string, the same however cut."""

import codecs
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.text.detokenizer import TextStream, spelled_out
from tests.suite.scale import share

MIXED = "aé€😀\u0301 z\u200d👩‍👩‍👧ß"


def pushed(tokens: list[bytes], stops: list[str] | None = None) -> tuple[list[str], TextStream]:
    """What each token released, and the stream after them."""
    stream = TextStream(tokens, stops or [])
    return [stream.push(i) for i in range(len(tokens))], stream


def whole_text(tokens: list[bytes], stops: list[str] | None = None) -> tuple[str, str | None]:
    pieces, stream = pushed(tokens, stops)
    return "".join(pieces) + stream.flush(), stream.stopped_by


def single_bytes(text: str) -> list[bytes]:
    return [bytes([b]) for b in text.encode()]


# UTF-8


@pytest.mark.parametrize("text", ["é", "€", "😀", MIXED])
def test_a_character_is_released_with_its_last_byte(text: str) -> None:
    for cut in range(len(text.encode()) + 1):
        data = text.encode()
        pieces, stream = pushed([data[:cut], data[cut:]])
        complete = data[:cut].decode(errors="ignore")
        assert pieces == [complete, text[len(complete) :]]
        assert stream.flush() == ""


def test_byte_by_byte_every_character_comes_once_and_whole() -> None:
    pieces, _ = pushed(single_bytes(MIXED))
    assert [piece for piece in pieces if piece] == list(MIXED)


def test_bytes_that_are_no_character_are_replaced_as_soon_as_that_is_certain() -> None:
    pieces, stream = pushed([b"a\xe2\x82", b"b", b"\xff", b"\xf0\x9f"])
    assert pieces == ["a", "\ufffdb", "\ufffd", ""]
    assert stream.flush() == "\ufffd"


def test_a_token_without_bytes_releases_nothing() -> None:
    pieces, _ = pushed([b"a\xc3", b"", b"\xa9", b""])
    assert pieces == ["a", "", "é", ""]


# Stop strings


def test_text_ends_before_a_stop_string_in_the_middle_of_a_token() -> None:
    assert whole_text([b"one END two"], ["END"]) == ("one ", "END")


def test_a_stop_string_may_straddle_tokens() -> None:
    pieces, stream = pushed([b"one E", b"N", b"D two", b"more"], ["END"])
    assert pieces == ["one ", "", "", ""]
    assert stream.stopped_by == "END"
    assert stream.flush() == ""


def test_what_was_held_back_is_released_when_the_match_fails() -> None:
    pieces, stream = pushed([b"a<", b"|e", b"n", b"x"], ["<|end|>"])
    assert pieces == ["a", "", "", "<|enx"]
    assert stream.stopped_by is None


def test_a_match_may_begin_inside_one_that_failed() -> None:
    assert whole_text([b"aa", b"a", b"b!"], ["aab"]) == ("a", "aab")
    assert whole_text(single_bytes("ababac"), ["abac"]) == ("ab", "abac")


def test_only_what_can_still_become_a_stop_string_is_held() -> None:
    pieces, stream = pushed([b"ab", b"ab"], ["abac"])
    assert pieces == ["", "ab"]
    assert stream.flush() == "ab"


def test_of_two_stop_strings_the_one_that_is_complete_first_ends_the_text() -> None:
    assert whole_text(single_bytes("xabcd"), ["abcd", "bc"]) == ("xa", "bc")
    assert whole_text(single_bytes("xabcd"), ["abcd", "zz"]) == ("x", "abcd")


def test_where_the_text_ends_does_not_depend_on_where_tokens_do() -> None:
    for tokens in ([b"xabcd"], [b"xab", b"cd"], single_bytes("xabcd")):
        assert whole_text(tokens, ["abcd", "bc"]) == ("xa", "bc")
        assert whole_text(tokens, ["c", "bc", "abc"]) == ("x", "abc")


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_ends_it() -> None:
    assert whole_text([b"x two one"], ["one", "two"]) == ("x ", "two")


def test_a_stop_string_that_begins_another_does_not_wait_for_it() -> None:
    pieces, stream = pushed([b"stop", b"ping"], ["stopping", "stop"])
    assert pieces == ["", ""]
    assert stream.stopped_by == "stop"


def test_a_stop_string_may_be_cut_inside_its_characters() -> None:
    stop = "é😀"
    for cut in range(len(stop.encode()) + 1):
        data = stop.encode()
        pieces, stream = pushed([b"x" + data[:cut], data[cut:] + b"y"], [stop])
        assert "".join(pieces) == "x"
        assert stream.stopped_by == stop


def test_a_character_that_begins_like_a_stop_string_is_released_whole() -> None:
    pieces, stream = pushed(single_bytes("è€"), ["é"])  # è and é share their first byte
    assert "".join(pieces) == "è€"
    assert stream.stopped_by is None


def test_characters_of_regular_expressions_are_only_characters() -> None:
    assert whole_text([b"a.b", b"(c|d)*", b"e"], ["(c|d)*"]) == ("a.b", "(c|d)*")
    assert whole_text([b"axb"], ["a.b"]) == ("axb", None)


def test_after_a_stop_string_there_is_no_more_text() -> None:
    stream = TextStream([b"END", b"text"], ["END"])
    assert [stream.push(0), stream.push(1), stream.flush()] == ["", "", ""]


def test_what_a_stream_holds_does_not_grow_with_the_square_of_a_stop_string() -> None:
    """All beginnings of 128 strings of 1024 bytes, a request's limit, would be 77 MB."""
    stops = [chr(ord("A") + i) * 1024 for i in range(16)]
    tracemalloc.start()
    try:
        stream = TextStream([b"a"], stops)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.push(0) == "a"
    assert held < 256 * 16 * 1024


def test_a_text_that_includes_its_stop_string_ends_with_it() -> None:
    for tokens in ([b"xab", b"cd"], [b"xabcd"], single_bytes("xabcd")):
        stream = TextStream(tokens, ["abc"], include_stop=True)
        pieces = [stream.push(i) for i in range(len(tokens))]
        assert "".join(pieces) == "xabc"
        assert stream.stopped_by == "abc"
        assert pieces[0] == tokens[0][:4].decode()  # nothing is held back


def test_control_tokens_are_spelled_out_where_that_is_asked_for() -> None:
    table = spelled_out([b"a", b"", b"b"], {1: b"<|end|>"})
    assert table == [b"a", b"<|end|>", b"b"]
    stream = TextStream(table, ["a<|end"])
    assert [stream.push(i) for i in range(2)] == ["", ""]
    assert stream.stopped_by == "a<|end"


# Against a plain reference

CHARACTERS = "ab€é"
STOPS = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3)


@st.composite
def split_text(draw: st.DrawFn) -> list[bytes]:
    """Valid UTF-8, cut anywhere."""
    data = draw(st.text(CHARACTERS, max_size=14)).encode()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12).map(sorted))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def random_bytes() -> st.SearchStrategy[list[bytes]]:
    """Anything: tokens of a model need not be valid text."""
    pieces = [
        b"a",
        b"b",
        "€".encode(),
        "é".encode(),
        b"\xe2",
        b"\x82\xac",
        b"\xc3",
        b"\xa9",
        b"\xff",
    ]
    return st.lists(st.sampled_from(pieces), max_size=12)


def reference(tokens: list[bytes], stops: list[str]) -> tuple[str, str | None]:
    """All text up to the stop string that ends first; of several that end there, the longest."""
    data = b"".join(tokens)
    for end in range(len(data) + 1):
        ending = [s.encode() for s in stops if data[:end].endswith(s.encode())]
        if ending:
            stop = max(ending, key=len)
            return data[: end - len(stop)].decode(errors="replace"), stop.decode()
    return data.decode(errors="replace"), None


def released(tokens: list[bytes], stops: list[str]) -> str:
    """All text that is decided by these tokens: no character and no stop string is open."""
    data = b"".join(tokens)
    beginnings = [s.encode()[:n] for s in stops for n in range(1, len(s.encode()))]
    held = max((len(b) for b in beginnings if data.endswith(b)), default=0)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data[: len(data) - held])


@given(split_text() | random_bytes(), STOPS)
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_text_is_what_plain_decoding_and_searching_give(
    tokens: list[bytes], stops: list[str]
) -> None:
    text, stopped_by = reference(tokens, stops)
    assert whole_text(tokens, stops) == (text, stopped_by)


@given(split_text() | random_bytes(), STOPS)
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_text_is_released_as_soon_as_it_is_decided_and_never_before(
    tokens: list[bytes], stops: list[str]
) -> None:
    stream = TextStream(tokens, stops)
    text = ""
    for n in range(len(tokens)):
        text += stream.push(n)
        if stream.stopped_by is not None:
            break
        assert text == released(tokens[: n + 1], stops)


@given(split_text(), STOPS)
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_valid_text_is_never_damaged(tokens: list[bytes], stops: list[str]) -> None:
    text, _ = whole_text(tokens, stops)
    assert "\ufffd" not in text
    assert b"".join(tokens).decode().startswith(text)


@given(split_text() | random_bytes(), STOPS)
@settings(max_examples=share(3000), derandomize=True, deadline=None)
def test_a_stream_can_be_resumed_after_any_token(tokens: list[bytes], stops: list[str]) -> None:
    """The first server stops after n tokens; a second one pushes them again, without their text."""
    uncut, stopped_by = whole_text(tokens, stops)
    for n in range(len(tokens) + 1):
        first, second = TextStream(tokens, stops), TextStream(tokens, stops)
        before = "".join(first.push(i) for i in range(n))
        for i in range(n):
            second.push(i)
        rest = "".join(second.push(i) for i in range(n, len(tokens))) + second.flush()
        assert before + rest == uncut
        assert second.stopped_by == stopped_by
