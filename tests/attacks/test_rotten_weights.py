"""A replica whose weights have rotted is another model, wherever in a file that has happened."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client import Client
from ssd_client.errors import ModelMismatchError
from ssd_client.generate.events import Started
from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from tests.process_tree import engine_held
from tests.processes import SHIPPED, target


def copy_of(name: str, folder: Path) -> Path:
    shutil.copytree(resolve_model(name), folder, copy_function=shutil.copy)
    return folder


def rot(folder: Path, size: int) -> None:
    """Zero so many bytes in the middle of the largest weight."""
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        begin, end = max(
            (each["data_offsets"] for each in header.values()), key=lambda o: o[1] - o[0]
        )
        assert end - begin > size + 16_384
        opened.seek(8 + length + (begin + end) // 2)
        opened.write(bytes(size))


@pytest.mark.parametrize("size", [4, 200_000])
def test_every_byte_of_the_weights_counts(size: int, tmp_path: Path) -> None:
    whole, rotten = copy_of(SHIPPED, tmp_path / "whole"), copy_of(SHIPPED, tmp_path / "rotten")
    rot(rotten, size)
    checkpoints = [open_checkpoint(each, load_model_config(each)) for each in (whole, rotten)]
    assert checkpoints[0].digest != checkpoints[1].digest
    assert (
        checkpoints[0].digest
        == open_checkpoint(resolve_model(SHIPPED), load_model_config(resolve_model(SHIPPED))).digest
    )


def test_no_text_goes_on_with_weights_that_have_rotted(tmp_path: Path) -> None:
    model = copy_of(SHIPPED, tmp_path / "model")
    rot(model, 200_000)
    with (
        target(tmp_path / "a") as good,
        target(
            tmp_path / "b",
            model=str(model),
        ) as bad,
        Client(good.address, bad.address) as client,
    ):
        infos = [each.stub().GetModelInfo(pb.GetModelInfoRequest()) for each in (good, bad)]
        assert infos[0].digest != infos[1].digest
        stream = client.stream("Once upon a time", max_tokens=600, ignore_eos=True, seed=3)
        with stream, pytest.raises(ModelMismatchError, match="another model"):
            pieces = stream.text()
            next(pieces)
            with engine_held(good.process.pid):
                good.kill()
            list(pieces)


@pytest.mark.parametrize(
    ("first", "second", "like"),
    [
        (("f", "2-a"), ("f", "2-a"), True),
        (("f", "2-a"), ("f", "2-b"), False),
        (("f", "2-a"), ("f", ""), True),  # an older target tells a fingerprint alone
        (("f", "2-a"), ("g", ""), False),
        (("f", "2-a"), ("f", "3-b"), True),  # of a newer one's definition nothing is known
        (("f", "2-a"), ("g", "3-a"), False),
        (("f", ""), ("f", ""), True),
    ],
)
def test_targets_of_other_versions_are_compared_by_what_both_tell(
    first: tuple[str, str], second: tuple[str, str], like: bool
) -> None:
    a, b = (Started("h:1", "r", 1, 1, *each) for each in (first, second))
    assert a.is_like(b) is b.is_like(a) is like
