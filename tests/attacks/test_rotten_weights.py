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

WHOLE = resolve_model(SHIPPED)


def rotten(folder: Path, size: int) -> Path:
    """A copy of a model with so many bytes zeroed in the middle of its largest weight."""
    shutil.copytree(WHOLE, folder, copy_function=shutil.copy)
    with (folder / "model.safetensors").open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        places = [each["data_offsets"] for each in header.values()]
        begin, end = max(places, key=lambda place: place[1] - place[0])
        assert end - begin > size + 16_384
        file.seek(8 + length + (begin + end) // 2)
        file.write(bytes(size))
    return folder


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    models = [WHOLE, *(rotten(tmp_path / str(size), size) for size in (0, 4, 200_000))]
    digests = [open_checkpoint(each, load_model_config(each)).digest for each in models]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_no_text_goes_on_with_weights_that_have_rotted(tmp_path: Path) -> None:
    model = str(rotten(tmp_path / "model", 200_000))
    with (
        target(tmp_path / "a") as good,
        target(tmp_path / "b", model=model) as bad,
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
