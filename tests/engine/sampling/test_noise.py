"""The noise: Philox4x32-10 as published, the same values however they are asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_engine.sampling import noise
from ssd_engine.sampling.noise import gumbel, gumbel_rows, philox, signed64, uniform_rows
from tests.suite.scale import share

VOCAB = 150_000
WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)
POSITION = st.integers(0, 2**48)
TOKEN = st.integers(0, VOCAB - 1)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
PUBLISHED = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def run_philox(counter: list[int], key: list[int]) -> list[int]:
    words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    return [word.item() for word in words]


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """As in the paper: high and low halves of two products, keys bumped between rounds."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def slow_gumbel(seed: int, position: int, token: int, stream: int = 0) -> float:
    counter = [token, position % 2**32, position >> 32, stream]
    x = slow_philox(counter, [seed % 2**32, seed >> 32])[0]
    return -math.log(-math.log((x + 0.5) / 2**32))


def one_gumbel(seed: int, position: int, token: int, stream: int = 0) -> float:
    words = (torch.tensor(signed64(seed)), torch.tensor(position), torch.tensor(token))
    return gumbel(*words, stream).item()


@pytest.mark.parametrize(("counter", "key", "output"), PUBLISHED)
def test_philox_gives_the_published_vectors(counter: str, key: str, output: str) -> None:
    assert run_philox(hex_words(counter), hex_words(key)) == hex_words(output)


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_philox_equals_a_plain_transcription_of_the_paper(
    counter: list[int], key: list[int]
) -> None:
    assert run_philox(counter, key) == slow_philox(counter, key)


def test_philox_words_broadcast_against_each_other() -> None:
    column, row = torch.tensor([[3], [2**32 - 1]]), torch.tensor([[5, 0, 2**31]])
    words = philox([row, column, torch.tensor(7), torch.tensor(0)], [column, torch.tensor(9)])
    for i, c in enumerate(column.flatten().tolist()):
        for j, r in enumerate(row.flatten().tolist()):
            assert [w[i, j].item() for w in words] == slow_philox([r, c, 7, 0], [c, 9])


@given(SEED, POSITION, TOKEN, st.integers(0, 3))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_noise_is_a_function_of_seed_position_token_and_stream(
    seed: int, position: int, token: int, stream: int
) -> None:
    value = one_gumbel(seed, position, token, stream)
    assert value == pytest.approx(slow_gumbel(seed, position, token, stream), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", [2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40])
def test_all_64_bits_of_seed_and_position_count(seed: int, position: int) -> None:
    value = one_gumbel(seed, position, 1)
    assert value == pytest.approx(slow_gumbel(seed, position, 1), rel=1e-12)
    assert value != one_gumbel(seed ^ 1 << 63, position, 1)
    assert value != one_gumbel(seed ^ 1 << 32, position, 1)
    assert value != one_gumbel(seed, position ^ 1 << 32, 1)
    assert value != one_gumbel(seed, position ^ 1, 1)


@given(SEED)
@settings(max_examples=100, derandomize=True)
def test_a_seed_becomes_the_int64_of_the_same_bits(seed: int) -> None:
    bits = torch.tensor(signed64(seed), dtype=torch.int64)
    assert int.from_bytes(bits.numpy().tobytes(), "little") == seed


@pytest.mark.parametrize(("word", "bound"), [(0, -3.13), (2**32 - 1, 22.87)])
def test_noise_is_finite_at_both_ends_of_the_generator(
    word: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full_like(counter[0], word),))
    tokens = torch.arange(33)  # vectorised lanes and the rest of them
    value = gumbel(torch.tensor(1), torch.tensor(2), tokens)
    assert value.isfinite().all()
    assert value.tolist() == pytest.approx([bound] * 33, abs=0.01)


@given(SEED, POSITION, st.integers(0, 3))
@settings(max_examples=share(1000), derandomize=True, deadline=None)
def test_the_number_of_a_row_is_made_of_two_words(seed: int, position: int, stream: int) -> None:
    counter = [0, position % 2**32, position >> 32, stream]
    high, low, *_ = slow_philox(counter, [seed % 2**32, seed >> 32])
    rows = uniform_rows(torch.tensor([signed64(seed)]), torch.tensor([position]), stream)
    assert rows.tolist() == [((high << 20 | low >> 12) + 0.5) / 2**52]


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_number_of_a_row_is_never_0_or_1(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (torch.full((3,), word),) * 4
    monkeypatch.setattr(noise, "philox", lambda counter, key: words)
    rows = uniform_rows(torch.zeros(3).long(), torch.zeros(3).long(), 1)
    assert ((rows > 0) & (rows < 1)).all()


def make_rows(n: int) -> tuple[Tensor, Tensor]:
    seeds = [signed64(2**64 - 1 - 3**i) for i in range(n)]
    return torch.tensor(seeds), torch.tensor([2**32 - 2 + i for i in range(n)])


@pytest.mark.parametrize("n", [1, 7])
def test_rows_of_a_large_vocabulary_equal_the_noise_of_each_token_bit_for_bit(n: int) -> None:
    seed, position = make_rows(n)
    rows = gumbel_rows(seed, position, VOCAB)
    assert rows.shape == (n, VOCAB)
    assert torch.equal(rows, gumbel(seed[:, None], position[:, None], torch.arange(VOCAB)))
    # Around every place where pieces could meet, one value at a time.
    edges = {edge + d for edge in range(0, VOCAB, 2**15 // n) for d in (-1, 0, 1)}
    for token in sorted({t for t in edges | {VOCAB - 1} if 0 <= t < VOCAB}):
        row = token % n
        alone = gumbel(seed[row], position[row], torch.tensor(token))
        assert torch.equal(rows[row, token], alone)


@pytest.mark.parametrize("n", [1, 7])
def test_noise_of_scattered_tokens_equals_their_rows_bit_for_bit(n: int) -> None:
    seed, position = make_rows(n)
    rows = gumbel_rows(seed, position, VOCAB)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 5, 31, 1000):
        row = torch.randint(n, (size,), generator=generator)
        token = torch.randint(VOCAB, (size,), generator=generator)
        assert torch.equal(gumbel(seed[row], position[row], token), rows[row, token])


@pytest.mark.parametrize("vocab", [1, 2, 2**15 - 1, 2**15, 2**15 + 1])
def test_rows_are_whole_for_any_vocabulary(vocab: int) -> None:
    seed, position = make_rows(2)
    rows = gumbel_rows(seed, position, vocab)
    assert torch.equal(rows, gumbel(seed[:, None], position[:, None], torch.arange(vocab)))


def test_more_rows_than_a_piece_holds_are_all_filled() -> None:
    n = 2**15 + 3
    seed, position = torch.arange(n), torch.arange(n) * 5
    rows = gumbel_rows(seed, position, 2)
    assert torch.equal(rows, gumbel(seed[:, None], position[:, None], torch.arange(2)))
