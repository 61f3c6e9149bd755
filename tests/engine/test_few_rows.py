"""A few rows times a weight: as BLAS has it, and the same whatever rows are beside it."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_engine.few_rows import MOST_ROWS, load_kernel, multiply, pack
from ssd_engine.linear import packed, plain_linear, second_layout, transposed
from tests.tools import needs_tool

KERNEL = load_kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="the kernel is for Arm")


@pytest.mark.skipif(platform.machine() != "aarch64", reason="the kernel is for Arm")
@needs_tool("a C compiler", "cc")
def test_it_was_built_with_the_package() -> None:
    assert KERNEL is not None


def product(x: Tensor, weight: Tensor) -> Tensor:
    assert KERNEL is not None
    return multiply(KERNEL, x, pack(weight), len(weight))


@needs_kernel
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 150), st.integers(0, 10**6))
def test_every_shape_is_the_product_in_double_precision(
    rows: int, outputs: int, inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    assert ((product(x, weight) - exact).abs() <= 1e-5 * size + 1e-12).all()


@needs_kernel
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(MOST_ROWS, 131), torch.randn(100, 131)
    together = product(x, weight)
    for begin in range(0, MOST_ROWS, 3):
        for rows in range(1, MOST_ROWS - begin + 1):
            part = product(x[begin : begin + rows], weight)
            assert torch.equal(part, together[begin : begin + rows])


@needs_kernel
def test_nothing_is_written_beside_the_result() -> None:
    assert KERNEL is not None
    x, weight = torch.randn(5, 64), torch.randn(19, 64)
    layout, room = pack(weight), torch.full((7, 19), 7.0)
    KERNEL(x.data_ptr(), layout.data_ptr(), room[1].data_ptr(), 5, 19, 64)
    assert (room[0] == 7.0).all()
    assert (room[6] == 7.0).all()
    torch.testing.assert_close(room[1:6], x @ weight.t())


@needs_kernel
def test_rows_that_are_not_contiguous() -> None:
    x, weight = torch.randn(64, 5).t(), torch.randn(24, 64)
    torch.testing.assert_close(product(x, weight), x @ weight.t())


@pytest.mark.parametrize("rows", [1, 2, 5, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_each_layout_gives_the_same_rows(rows: int, biased: bool) -> None:
    weights = [torch.randn(30, 48), torch.randn(16, 48)]
    bias = torch.randn(30) if biased else None
    x = torch.randn(rows, 48)
    layouts = [transposed(weights), second_layout(weights)]
    if KERNEL is not None:
        layouts.append(packed(weights, KERNEL))
    for linear in layouts:
        torch.testing.assert_close(
            linear(x, weights[0], bias), plain_linear(x, weights[0], bias), atol=1e-4, rtol=1e-4
        )


def test_a_weight_without_a_second_layout_is_served() -> None:
    known, other, x = torch.randn(30, 48), torch.randn(16, 48), torch.randn(5, 48)
    assert torch.equal(second_layout([known])(x, other, None), plain_linear(x, other, None))
