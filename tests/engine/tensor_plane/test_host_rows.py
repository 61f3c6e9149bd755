"""Rows on their way to the host are complete when they are asked for."""

from typing import Any

import pytest
import torch

from ssd_engine.tensor_plane.host_rows import HostRows, host_copies, pinned_if_it_can_be

WIDTH = 96


def pieces(device: torch.device) -> list[torch.Tensor]:
    rows = torch.arange(40.0, device=device).unsqueeze(1).repeat(1, WIDTH)
    return [rows[0:5], rows[9:10], rows[20:40]]


def check(device: torch.device) -> None:
    copies = host_copies(device)
    told = pieces(device)
    landed = copies.copy(told, copies.mark())
    for rows, piece in zip(landed, told, strict=True):
        assert len(rows) == len(piece)
        assert rows.num_bytes == piece.nbytes
        settled = rows.settled()
        for each in (rows, settled, settled.part(0, 1)):
            assert torch.equal(each.get(), piece.cpu()[: len(each)])
            assert each.get().device.type == "cpu"


def test_pieces_are_copied_as_they_are() -> None:
    check(torch.device("cpu"))


def test_what_is_written_later_does_not_change_a_copy() -> None:
    copies, rows = host_copies(torch.device("cpu")), torch.zeros(3, WIDTH)
    [copy] = copies.copy([rows], copies.mark())
    rows.fill_(7)
    assert not copy.get().any()


def test_a_part_shares_memory_until_it_is_settled() -> None:
    whole = HostRows(torch.zeros(8, WIDTH), borrowed=True)
    part = whole.part(2, 4)
    assert part.get().data_ptr() == whole.get()[2:].data_ptr()
    assert part.settled().get().data_ptr() != part.get().data_ptr()


def test_where_no_memory_can_be_pinned_rows_are_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty

    def full(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", full)
    assert pinned_if_it_can_be((3, WIDTH), torch.float32).shape == (3, WIDTH)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_does_not_wait_for_what_was_launched_after_its_mark() -> None:
    device = torch.device("cuda")
    check(device)
    copies, rows = host_copies(device), pieces(device)
    torch.cuda.synchronize()
    mark = copies.mark()
    busy = torch.cuda.Event()
    torch.cuda._sleep(20_000_000_000)  # about ten seconds
    busy.record()
    landed = copies.copy(rows, mark)
    assert torch.equal(landed[0].get()[:, 0], torch.arange(5.0))
    assert not busy.query()
    torch.cuda.synchronize()
