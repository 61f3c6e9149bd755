"""What ranks have is added up in one order, also by the kernel that does so on a device."""

import pytest
import torch

from ssd_engine.models import ordered_sum as sums
from ssd_engine.models.ordered_sum import ordered_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the kernel is interpreted


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 300), (1,), (2 * sums.PIECE,)], ids=str)
def test_the_kernel_adds_up_in_the_same_order(
    ranks: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(ranks)
    parts = torch.randn(ranks, *shape).mul(37).to(dtype)
    assert torch.equal(sums._on_device(parts.to(DEVICE)).cpu(), ordered_sum(parts))


def test_halves_are_rounded_once() -> None:
    one, little = torch.ones(2, 3), torch.full((2, 3), 2.0**-9)
    parts = torch.stack([one, little, little]).bfloat16()
    assert ordered_sum(parts).tolist() == (one + 2.0**-8).bfloat16().tolist()
    assert ordered_sum(torch.stack([one, one / 3, one / 7]).double()).dtype is torch.float64
