"""What stop strings cost: as much for each byte, whichever strings there are."""

import pytest

from ssd_engine.text.detokenizer import TextStream


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
