"""The sections on heads, rehearsed on a CPU, and what makes them fail."""

import pytest

from ssd.v1 import target_pb2 as pb
from tools.bench_kit import Generated
from tools.gpu import features as features_section
from tools.gpu import head_comes as coming_section
from tools.gpu import heads as section
from tools.gpu.features import features
from tools.gpu.heads import DEPTH, Place, heads, rows_to_tell
from tools.gpu.report import FAILED
from tools.gpu.shapes import SHAPES

CPU = Place(
    device="cpu",
    shape="",
    row_bytes=3 * 256 * 4,
    prompts=2,
    tokens=24,
    long_prompt=300,
    repeats=1,
    has_limits=False,
)


def test_rows_to_tell_are_those_of_committed_tokens() -> None:
    """All rows of each round are more than that, with usual acceptance."""
    tokens, prompt, rounds = 128, 20, 40
    done = [Generated([7] * tokens, 1.0, pb.SpeculationStats(rounds=rounds), prompt=prompt)] * 4
    least, most = rows_to_tell(done)
    assert most == 4 * (prompt + tokens - 1)
    assert least == most - 4 * 2 * (DEPTH + 1)
    assert 4 * (prompt + rounds * (DEPTH + 1)) > most
    assert rows_to_tell([Generated([7, 7], 1.0, done[0].stats, cached=16, prompt=20)])[1] == 5


@pytest.mark.full  # five services start
def test_heads_are_rehearsed_on_a_cpu() -> None:
    rows = heads(CPU)
    assert not any(FAILED in row for row in rows), rows
    modes = {row["mode"] for row in rows}
    assert modes >= {"off", "sync", "ssd", "features late", "a head, as it comes"}
    assert modes >= {f"ssd, a head, {depth} deep" for depth in (1, 2, section.DEPTH)}


SMALL = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4200,
}
SLOW_HOST = features_section.Place(
    device="cpu",
    dtype="float32",
    shape=SMALL,
    boundaries=(1, 2, 3),
    draft_vocab=1000,
    length=1024,
    turns=1,
    repeats=1,
    tokens=40,
    has_limits=False,
)


def test_what_features_cost_is_rehearsed_on_a_cpu() -> None:
    rows = features(SLOW_HOST)
    assert not any(FAILED in row for row in rows), rows
    [told] = [row for row in rows if row["measured"].startswith("rows told")]
    assert told["off by"] < 1e-4


def test_a_head_that_comes_is_rehearsed_on_a_cpu() -> None:
    rows = coming_section.head_comes(coming_section.REHEARSED)
    assert not any(FAILED in row for row in rows), rows
    assert [row["boundaries"] for row in rows] == ["1 2", "2 3", "0 1"]
    late = coming_section.Waits([4.0] * 20, [5.0, 25.0], [9.0])
    assert coming_section._row(coming_section.GPU, late)[FAILED].startswith("streams wait 21.0 ms")
