"""Safetensors checkpoints, loaded strictly.

The headers alone tell whether a checkpoint fits its config, so that is checked first, without
torch and without reading weights. A missing, extra or misshaped weight is an error.
"""

import hashlib
import json
import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ssd_engine.config import ModelConfig
from ssd_engine.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32", "BF16", "F16"}
FINGERPRINT_SAMPLE = 4096  # bytes of each tensor that enter the fingerprint
DIGEST_PIECE = 1 << 20


@dataclass(frozen=True)
class WeightEntry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of the data in the file, in bytes
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
            with entry.file.open("rb") as file:
                file.seek(entry.offset)
                digest.update(file.read(min(entry.size, FINGERPRINT_SAMPLE)))
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
    sums = bytearray()
    try:
        with entry.file.open("rb") as file:
            file.seek(entry.offset)
            for begin in range(0, entry.size, DIGEST_PIECE):
                piece = file.read(min(DIGEST_PIECE, entry.size - begin))
                sums += zlib.crc32(piece).to_bytes(4)
    except OSError as error:
        raise ModelError(f"{entry.file}: cannot be read: {error.strerror}") from None
    return bytes(sums)


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """Read the headers and hold them against the config."""
    entries: dict[str, WeightEntry] = {}
    for file in _weight_files(directory):
        entries.update(_read_header(file))
    _drop_redundant(entries, config)
    check_weights(entries, expected_shapes(config))
    return Checkpoint(entries)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a checkpoint of this config holds."""
    d, v = config.hidden_size, config.embedding_rows
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, d)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, ff, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (d,)
    if config.mlp_bias:
        shapes |= {f"mlp.{p}_proj.bias": (n,) for p, n in (("gate", ff), ("up", ff), ("down", d))}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (hd,), "self_attn.k_norm.weight": (hd,)}
    return shapes


def check_weights(entries: dict[str, WeightEntry], expected: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - entries.keys())
    if missing:
        raise ModelError(f"checkpoint: weight {missing[0]} is missing{_and_more(missing)}")
    extra = sorted(entries.keys() - expected.keys())
    if extra:
        raise ModelError(
            f"checkpoint: weight {extra[0]} is not part of this model{_and_more(extra)}"
        )
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ModelError(
                f"checkpoint: weight {name} has shape {list(entry.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        if entry.dtype not in DTYPES:
            raise ModelError(f"checkpoint: weight {name} has dtype {entry.dtype}, not {DTYPES}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _drop_redundant(entries: dict[str, WeightEntry], config: ModelConfig) -> None:
    """Old exporters store RoPE's frequencies and a copy of a tied head; neither is a weight."""
    for name in [n for n in entries if n.endswith("rotary_emb.inv_freq")]:
        del entries[name]
    head, embedding = entries.get("lm_head.weight"), entries.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head and embedding:
        if _read_bytes(head) != _read_bytes(embedding):
            raise ModelError(
                "checkpoint: lm_head.weight differs from the embedding, "
                "but config.json says tie_word_embeddings"
            )
        del entries["lm_head.weight"]


def _read_bytes(entry: WeightEntry) -> bytes:
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.size)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        return _indexed_files(directory)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    hint = ""
    if any(directory.glob("*.bin")) or any(directory.glob("*.gguf")):
        hint = "; only safetensors are read, convert the weights first"
    raise ModelError(f"{directory}: neither {SINGLE} nor {INDEX} is there{hint}")


def _indexed_files(directory: Path) -> list[Path]:
    try:
        weight_map: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{directory / INDEX} cannot be read: {error!r}") from None
    for file in files:
        if file.parent != directory or not file.is_file():
            raise ModelError(f"{directory / INDEX}: shard {file.name} is missing")
    held = {name: file.name for file in files for name in _read_header(file)}
    for name, shard in weight_map.items():
        if held.get(name) != shard:
            raise ModelError(f"{directory / INDEX}: {name} is not in {shard}")
    return files


def _read_header(file: Path) -> dict[str, WeightEntry]:
    """The safetensors layout: 8 bytes of length, a JSON header, then the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, 8 + length, raw) for name, raw in header.items()}
        if any(entry.offset + entry.size > size for entry in entries.values()):
            raise ValueError("file is shorter than its header says")
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is not a complete safetensors file: {error}") from None


def _entry(file: Path, base: int, raw: dict[str, Any]) -> WeightEntry:
    begin, end = raw["data_offsets"]
    return WeightEntry(file, raw["dtype"], tuple(raw["shape"]), base + begin, end - begin)
