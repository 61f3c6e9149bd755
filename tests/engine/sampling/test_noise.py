"""The noise: Philox4x32-10 as published, the same values however they are asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.sampling import noise
from ssd_engine.sampling.noise import (
    gumbel,
    gumbel_of_rows,
    gumbel_rows,
    philox,
    signed64,
    uniform_rows,
)
from tests.suite.scale import share

VOCAB = 150_000
SEED = st.integers(0, 2**64 - 1)
POSITION = st.integers(0, 2**48)
TOKEN = st.integers(0, VOCAB - 1)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
PUBLISHED = [
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


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
def test_philox_gives_the_published_vectors(
    counter: list[int], key: list[int], output: list[int]
) -> None:
    words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [word.item() for word in words] == slow_philox(counter, key) == output


@given(SEED, POSITION, TOKEN, st.integers(0, 3), st.integers(0, 63), st.integers(0, 40))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_noise_is_a_function_of_seed_position_token_and_stream(
    seed: int, position: int, token: int, stream: int, bit: int, place: int
) -> None:
    """Of all 64 bits of a seed, and all of a position."""
    value = one_gumbel(seed, position, token, stream)
    assert value == pytest.approx(slow_gumbel(seed, position, token, stream), rel=1e-12, abs=1e-12)
    assert value != one_gumbel(seed ^ 1 << bit, position, token, stream)
    assert value != one_gumbel(seed, position ^ 1 << place, token, stream)


@given(SEED, POSITION, st.integers(0, 3))
@settings(max_examples=share(1000), derandomize=True, deadline=None)
def test_the_number_of_a_row_is_made_of_two_words(seed: int, position: int, stream: int) -> None:
    counter = [0, position % 2**32, position >> 32, stream]
    high, low, *_ = slow_philox(counter, [seed % 2**32, seed >> 32])
    rows = uniform_rows(torch.tensor([signed64(seed)]), torch.tensor([position]), stream)
    assert rows.tolist() == [((high << 20 | low >> 12) + 0.5) / 2**52]


@pytest.mark.parametrize(("word", "bound"), [(0, -3.13), (2**32 - 1, 22.87)])
def test_both_ends_of_the_generator_give_finite_noise_and_rows_within_0_and_1(
    word: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        noise, "philox", lambda counter, key: (torch.full_like(counter[0], word),) * 4
    )
    tokens = torch.arange(33)  # vectorised lanes and the rest of them
    value = gumbel(torch.tensor(1), torch.tensor(2), tokens)
    assert value.tolist() == pytest.approx([bound] * 33, abs=0.01)
    rows = uniform_rows(torch.zeros(3).long(), torch.zeros(3).long(), 1)
    assert ((rows > 0) & (rows < 1)).all()


def make_rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = [signed64(2**64 - 1 - 3 ** (i % 40)) for i in range(n)]
    return torch.tensor(seeds), torch.tensor([2**32 - 2 + i for i in range(n)])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("n", "vocab"),
    # The last one has more rows than a piece holds.
    [
        (1, VOCAB),
        (7, VOCAB),
        (2, 1),
        (2, 2),
        (3, 63),
        (3, 65),
        (2, 2**15 - 1),
        (2, 2**15),
        (2, 2**15 + 1),
        (2**15 + 3, 2),
    ],
)
def test_noise_of_rows_and_of_scattered_tokens_is_that_of_each_token_bit_for_bit(
    n: int, vocab: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noise.load_uniform_noise() is not None
    if not compiled:
        monkeypatch.setattr(noise, "load_uniform_noise", lambda: None)
    seed, position = make_rows(n)
    rows = gumbel_rows(seed, position, vocab)
    assert torch.equal(rows, gumbel(seed[:, None], position[:, None], torch.arange(vocab)))
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 5, 31, 1000):
        row = torch.randint(n, (size,), generator=generator)
        token = torch.randint(vocab, (size,), generator=generator)
        assert torch.equal(gumbel(seed[row], position[row], token), rows[row, token])
        tokens = torch.randint(vocab, (n, size % 70), generator=generator)
        assert torch.equal(gumbel_of_rows(seed, position, tokens), rows.gather(1, tokens))
