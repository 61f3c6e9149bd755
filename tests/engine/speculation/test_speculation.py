"""A speculation and the path in it that came true."""

import pytest

from ssd_engine.speculation.speculation import Speculation, accepted_path


@pytest.mark.parametrize(
    ("tokens", "own", "accepted"),
    [
        ([], [7], 0),
        ([7], [7, 8], 1),
        ([6], [7, 8], 0),
        ([7, 8, 9], [7, 8, 9, 1], 3),
        ([7, 8, 9], [7, 8, 1, 1], 2),
        ([7, 0, 9], [7, 8, 9, 1], 1),  # what is right after a wrong guess does not count
        ([0, 8, 9], [7, 8, 9, 1], 0),
    ],
)
def test_what_is_right_is_a_path_from_the_last_committed_token(
    tokens: list[int], own: list[int], accepted: int
) -> None:
    speculation = Speculation(tokens)
    path = accepted_path(speculation, own)
    assert len(path) == accepted
    before = -1
    for place in path:
        assert speculation.parents[place] == before
        assert speculation.tokens[place] == own[before + 1]
        before = place


def test_every_token_has_a_parent_that_comes_before_it() -> None:
    speculation = Speculation([4, 6, 7])
    assert list(speculation.parents) == [-1, 0, 1]
    assert len(speculation) == len(speculation.parents) == 3
    assert not Speculation()
