"""Safetensors checkpoints, loaded strictly.

The headers alone tell whether a checkpoint fits its config, so that is checked first, without
torch and without reading weights. A missing, extra or misshaped weight is an error.
"""

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from safetensors import SafetensorError, safe_open

from ssd_engine.checkpoints.files.model_files import (
    LISTING_BYTES,
    Fields,
    is_there,
    named,
    open_file,
    parse_object,
    read_object,
    reason_of,
    shown,
)
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from ssd_engine.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element
OTHER_DTYPES = {"I64": 8, "BOOL": 1}  # of what is no weight of a product
HEADER_BYTES = 1 << 24  # the longest header
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]  # none that could not be counted in bytes
Shape = Annotated[tuple[Size, ...], Meta(max_length=8)]
FINGERPRINT_SAMPLE = 4096  # bytes of each tensor that enter the fingerprint
DIGEST_PIECE = 1 << 20
NO_OTHERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class WeightEntry:
    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]
    offset: int  # where its data begin in the file, in bytes
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a directory: where each lies and what it is."""

    entries: dict[str, WeightEntry]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @cached_property
    def fingerprint(self) -> str:
        """Names, shapes and a sample of every tensor: tells fine-tunes apart, reads little."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            digest.update(next(_pieces(entry, FINGERPRINT_SAMPLE), b""))
        return digest.hexdigest()[:32]

    @cached_property
    def digest(self) -> str:
        """Names, shapes and every byte: tells a rotten disk. Pieces are checked by CRC-32, as fast
        as they are read."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            digest.update(_sums(entry))
        return digest.hexdigest()[:32]


def _sums(entry: WeightEntry) -> bytes:
    """The checksums of its pieces, 4 bytes each."""
    return b"".join(zlib.crc32(piece).to_bytes(4) for piece in _pieces(entry))


def _pieces(entry: WeightEntry, size: int = DIGEST_PIECE) -> Iterator[bytes]:
    """The bytes of a weight, a piece at a time."""
    try:
        with open_file(entry.file) as file:
            file.seek(entry.offset)
            for begin in range(0, entry.size, size):
                yield file.read(min(size, entry.size - begin))
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """Read the headers and hold them against the config."""
    entries = read_headers(directory)
    _drop_redundant(entries, config)
    check_weights(directory, entries, expected_shapes(config))
    return Checkpoint(entries)


def check_weights(
    directory: Path, entries: dict[str, WeightEntry], expected: dict[str, tuple[int, ...]]
) -> None:
    missing = sorted(expected.keys() - entries.keys())
    if missing:
        raise ModelError(f"{directory}: weight {missing[0]} is missing{_and_more(missing)}")
    extra = sorted(entries.keys() - expected.keys())
    if extra:
        raise ModelError(
            f"{entries[extra[0]].file}: weight {named(extra[0])} is not part of this model"
            f"{_and_more(extra)}"
        )
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: weight {name} has shape {list(entry.shape)}, "
                f"config.json asks for {list(shape)}"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _drop_redundant(entries: dict[str, WeightEntry], config: ModelConfig) -> None:
    """Old exporters store RoPE's frequencies and a copy of a tied head; neither is a weight."""
    for name in [n for n in entries if n.endswith("rotary_emb.inv_freq")]:
        del entries[name]
    head, embedding = entries.get("lm_head.weight"), entries.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head and embedding:
        if head.size != embedding.size or any(
            ours != theirs for ours, theirs in zip(_pieces(head), _pieces(embedding), strict=True)
        ):
            raise ModelError(
                f"{head.file}: lm_head.weight differs from the embedding, "
                "but config.json says tie_word_embeddings"
            )
        del entries["lm_head.weight"]


def read_headers(directory: Path, others: Mapping[str, str] = NO_OTHERS) -> dict[str, WeightEntry]:
    """``others``: what else may be there by these names, and of which of OTHER_DTYPES it is."""
    if is_there(directory / INDEX):
        return _read_shards(directory, others)
    if is_there(directory / SINGLE):
        return _read_header(directory / SINGLE, others)
    hint = ""
    if any(directory.glob("*.bin")) or any(directory.glob("*.gguf")):
        hint = "; only safetensors are read, convert the weights first"
    raise ModelError(f"{directory}: neither {SINGLE} nor {INDEX} is there{hint}")


def _read_shards(directory: Path, others: Mapping[str, str]) -> dict[str, WeightEntry]:
    """The weights of all files that the index names, each where the index says."""
    index = directory / INDEX
    fields = Fields(index, read_object(index, LISTING_BYTES))
    weight_map = fields.nested("weight_map")
    if not weight_map.values:
        raise fields.problem("weight_map", "the names of weights, and the file of each, are needed")
    entries: dict[str, WeightEntry] = {}
    for shard in sorted({_shard(weight_map, name) for name in weight_map.values}):
        if not is_there(directory / shard):
            raise ModelError(f"{index}: shard {named(shard)} is missing")
        held = _read_header(directory / shard, others)
        twice = entries.keys() & held.keys()
        if twice:
            raise ModelError(f"{directory / shard}: weight {named(min(twice))} is in another shard")
        entries |= held
    for name, shard in weight_map.values.items():
        if name not in entries or entries[name].file.name != shard:
            raise ModelError(f"{index}: {named(name)} is not in {named(shard)}")
    return entries


def _shard(weight_map: Fields, name: str) -> str:
    """The file of a weight: one of this directory, and no way out of it."""
    shard = weight_map.get(name)
    if not isinstance(shard, str) or shard != os.path.basename(shard) or shard in ("", ".", ".."):
        raise weight_map.problem(
            named(name), f"the name of a file in this directory is needed, got {shown(shard)}"
        )
    return shard


def _read_header(file: Path, others: Mapping[str, str]) -> dict[str, WeightEntry]:
    """The safetensors layout: 8 bytes of length, a JSON header, then the data.

    The library reads the same header, but tells neither where a weight lies, which digests need,
    nor which field of a weight is wrong.
    """
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, HEADER_BYTES):
                raise _incomplete(file, f"it has {size} bytes, its header should have {length}")
            text = stream.read(length).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _incomplete(file, reason_of(error)) from None
    header = parse_object(f"{file}: the header", text)
    header.pop("__metadata__", None)
    entries = {
        name: _entry(file, 8 + length, name, raw, others.get(name)) for name, raw in header.items()
    }
    _check_layout(file, entries, 8 + length, size)
    _check_with_library(file)
    return entries


def _check_with_library(file: Path) -> None:
    """Who reads the weights later has the last word, on metadata for one."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {reason_of(error)}") from None


def _incomplete(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is not a complete safetensors file: {reason}")


def _entry(file: Path, base: int, name: str, raw: Any, other: str | None) -> WeightEntry:
    """One weight of a header, whose bytes are as many as its shape needs."""
    source = f"{file}: weight {named(name)}"
    if not isinstance(raw, dict):
        raise ModelError(f"{source}: dtype, shape and data_offsets are needed, got {shown(raw)}")
    fields = Fields(source, raw)
    dtype = fields.get("dtype")
    sizes = DTYPES if other is None else {other: OTHER_DTYPES[other]}
    if not isinstance(dtype, str) or dtype not in sizes:
        kinds = ", ".join(sizes)
        raise ModelError(f"{source} has dtype {_bare(dtype)}, one of {kinds} is needed")
    shape = fields.read("shape", Shape, "a list of sizes, which are integers from 0 on,")
    two_integers = "a list of two integers, begin and end in bytes,"
    begin, end = fields.read("data_offsets", tuple[Size, Size], two_integers)
    if begin > end:
        raise fields.wrong("data_offsets", two_integers)
    if end - begin != math.prod(shape) * sizes[dtype]:
        needed = f"{shown(math.prod(shape) * sizes[dtype])} bytes for {dtype} of this shape"
        raise fields.problem("data_offsets", f"{needed} are needed, got {shown(end - begin)}")
    return WeightEntry(file, name, dtype, shape, base + begin, end - begin)


def _bare(value: Any) -> str:
    return named(value) if isinstance(value, str) else shown(value)


def _check_layout(file: Path, entries: dict[str, WeightEntry], base: int, size: int) -> None:
    """One weight follows the other, from the end of the header to that of the file."""
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != end:
            what = "overlaps the weight before it" if entry.offset < end else "leaves a hole"
            raise ModelError(f"{file}: weight {named(name)}: data_offsets: begin {what}")
        end += entry.size
    if end != size:
        raise _incomplete(file, f"it has {size} bytes, its weights end at {end}")
