"""Text out of tokens: whole characters, nothing of a stop string, the same however cut."""

import codecs
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.text.detokenizer import TextStream, spelled_out
from tests.suite.scale import share


def pushed(tokens: list[bytes], stops: list[str] | None = None) -> tuple[list[str], TextStream]:
    """What each token released, and the stream after them."""
    stream = TextStream(tokens, stops or [])
    return [stream.push(i) for i in range(len(tokens))], stream


@pytest.mark.parametrize(
    ("tokens", "stops", "pieces", "stopped_by"),
    [
        # no character: replaced as soon as that is certain
        ([b"a\xe2\x82", b"b", b"\xff"], [], ["a", "\ufffdb", "\ufffd", ""], None),
        ([b"a\xf0\x9f"], [], ["a", "\ufffd"], None),
        ([b"a\xc3", b"", b"\xa9", b""], [], ["a", "", "é", "", ""], None),
        # in the middle of a token, and across tokens; after it there is no more text
        ([b"one END two"], ["END"], ["one ", ""], "END"),
        ([b"one E", b"N", b"D two", b"more"], ["END"], ["one ", "", "", "", ""], "END"),
        # what was held back is released when the match fails; no more is held than may match
        ([b"a<", b"|e", b"n", b"x"], ["<|end|>"], ["a", "", "", "<|enx", ""], None),
        ([b"ab", b"ab"], ["abac"], ["", "ab", "ab"], None),
        ([b"\xc3", b"\xa8", b"x"], ["é"], ["", "è", "x", ""], None),  # they share a first byte
        # a match may begin inside one that failed
        ([b"aa", b"a", b"b!"], ["aab"], ["", "a", "", ""], "aab"),
        # of two the one that is complete first, however tokens are cut
        ([b"xabcd"], ["abcd", "bc"], ["xa", ""], "bc"),
        ([b"xab", b"cd"], ["abcd", "bc"], ["x", "a", ""], "bc"),
        ([b"xabcd"], ["abcd", "zz"], ["x", ""], "abcd"),
        ([b"xabcd"], ["c", "bc", "abc"], ["x", ""], "abc"),
        ([b"x two one"], ["one", "two"], ["x ", ""], "two"),
        ([b"stop", b"ping"], ["stopping", "stop"], ["", "", ""], "stop"),
        # characters of regular expressions are only characters
        ([b"a.b", b"(c|d)*", b"e"], ["(c|d)*"], ["a.b", "", "", ""], "(c|d)*"),
        ([b"axb"], ["a.b"], ["axb", ""], None),
    ],
)  # fmt: skip
def test_what_each_token_releases(
    tokens: list[bytes], stops: list[str], pieces: list[str], stopped_by: str | None
) -> None:
    """The last piece is what the end of the text releases."""
    released, stream = pushed(tokens, stops)
    assert [*released, stream.flush()] == pieces
    assert stream.stopped_by == stopped_by


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


def test_control_tokens_are_spelled_out_where_that_is_asked_for() -> None:
    table = spelled_out([b"a", b"", b"b"], {1: b"<|end|>"})
    assert table == [b"a", b"<|end|>", b"b"]
    stream = TextStream(table, ["a<|end"])
    assert [stream.push(i) for i in range(2)] == ["", ""]
    assert stream.stopped_by == "a<|end"


# Against a plain reference

CHARACTERS = "ab€é😀"
STOPS = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3)


@st.composite
def split_text(draw: st.DrawFn) -> list[bytes]:
    """Valid UTF-8, cut anywhere."""
    data = draw(st.text(CHARACTERS, max_size=14)).encode()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12).map(sorted))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# Anything: tokens of a model need not be valid text.
PIECES = (b"a", b"b", "€".encode(), "é".encode(), b"\xe2", b"\x82\xac", b"\xc3", b"\xa9", b"\xff")
RANDOM_BYTES = st.lists(st.sampled_from(PIECES), max_size=12)


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


@given(split_text() | RANDOM_BYTES, STOPS)
@settings(max_examples=share(6000), derandomize=True, deadline=None)
def test_text_is_that_of_plain_decoding_and_searching_as_soon_as_it_is_decided(
    tokens: list[bytes], stops: list[str]
) -> None:
    stream, text = TextStream(tokens, stops), ""
    for n in range(len(tokens)):
        text += stream.push(n)
        assert stream.stopped_by is not None or text == released(tokens[: n + 1], stops)
    assert (text + stream.flush(), stream.stopped_by) == reference(tokens, stops)


class Counted(dict[int, int]):
    """Transitions of an automaton that count how often they are looked at."""

    looks = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


@pytest.mark.parametrize(
    "stops",
    [["never"], ["a" * 1000 + chr(98 + i) for i in range(7)]],
    ids=["harmless", "overlapping"],
)
def test_no_list_of_stop_strings_makes_a_byte_cost_more(stops: list[str]) -> None:
    """Overlapping stop strings at the limit, over a long text of nothing but matches.

    Looking again at all that is held back, at every token, would be hundreds of looks a byte.
    """
    stream = TextStream([b"a"], stops)
    counted = stream._stops._next = Counted(stream._stops._next)
    for _ in range(1900):
        stream.push(0)
    assert 0 < counted.looks <= 2 * 1900
