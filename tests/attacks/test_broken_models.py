"""A model's directory that is broken, by accident or by intent, is one line and exit code 2.

Every service reads the same files with the same code, so all of them are tried in this process,
through their real commands, and one as a process of its own.
"""

import itertools
import json
import logging
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ssd_draft.cli import main as draft_main
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_serving.engine.client import EngineProcess
from ssd_target.cli import main as target_main
from tests.suite.scale import FULL, full_only
from tests.waiting import HANG_SECONDS

SPARE_BYTES = 2 << 30  # of address space, beyond what this process has when a case begins
NESTED = b"[" * 100_000
COMMANDS = {"target": target_main, "draft": draft_main}
WAYS = list(itertools.product(COMMANDS, ((), ("--check-config",))))
WHOLE = resolve_model("stories-draft")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEMPLATE = "chat_template.jinja"
# By name in the directory, or its own: what is there instead, bytes of a file or what makes it.
Files = Mapping[str, bytes | Callable[[Path], Any] | None]


@dataclass(frozen=True)
class Case:
    files: Files
    words: tuple[str, ...]  # that the line has: file, field, and what would be right
    draft: bool = True  # whether a draft looks at it, too


def spoil(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        if name:
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            content(path)


ABSENT = object()


def has(name: str, /, **values: Any) -> Files:
    """Some fields of a JSON file are others, or absent."""

    def write(path: Path) -> None:
        content = {**json.loads((WHOLE / name).read_text()), **values}
        kept = {key: value for key, value in content.items() if value is not ABSENT}
        path.write_text(json.dumps(kept))

    return {name: write}


config = partial(has, "config.json")
tokenizer = partial(has, "tokenizer.json")
settings = partial(has, "tokenizer_config.json")
generation = partial(has, "generation_config.json")
MODEL = json.loads((WHOLE / "tokenizer.json").read_text())["model"]


def raw(name: str, key: str, value: str) -> Files:
    """One field of a JSON file is what Python would not write."""
    content = json.loads((WHOLE / name).read_text())
    return {name: json.dumps({**content, key: "@"}).replace('"@"', value).encode()}


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, chdir(path.parent):  # paths must be short
        listening.bind(path.name)


def leads_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def header_of(weights: Path) -> dict[str, Any]:
    with weights.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
    return header


HEADER = header_of(WHOLE / WEIGHTS)


def weights(
    header: bytes | dict[str, Any] = HEADER,
    before: bytes = b"",
    end: int | None = None,
    after: bytes = b"",
    length: int | None = None,
) -> Files:
    """A header, or what is there in its place, of this length as it says itself; and the weights up
    to an end, with bytes before and after them."""
    first = header if isinstance(header, bytes) else json.dumps(header).encode()

    def write(path: Path) -> None:
        data = (WHOLE / WEIGHTS).read_bytes()
        begin = 8 + struct.unpack_from("<Q", data)[0]
        size = struct.pack("<Q", len(first) if length is None else length)
        path.write_bytes(size + first + before + data[begin:][:end] + after)

    return {WEIGHTS: write}


def weight(name: str, **values: Any) -> Files:
    """Some of what the header says of one weight is other."""
    return weights({**HEADER, name: {**HEADER[name], **values}})


def index(weight_map: Any) -> Files:
    return {INDEX: json.dumps({"weight_map": weight_map}).encode()}


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
BEGIN, END = HEADER[NORM]["data_offsets"]
NAMES = [name for name in HEADER if name != "__metadata__"]
LAST = max(NAMES, key=lambda name: HEADER[name]["data_offsets"][1])
FEWER = {name: about for name, about in HEADER.items() if name != LAST}
MOVED = {
    name: {**HEADER[name], "data_offsets": [each + 8 for each in HEADER[name]["data_offsets"]]}
    for name in NAMES
}  # by eight bytes that belong to none
SIZE = max(HEADER[name]["data_offsets"][1] for name in NAMES)
SMALL = {"dtype": "F32", "shape": [2], "data_offsets": [SIZE, SIZE + 8]}
TWICE = dict.fromkeys(NAMES, WEIGHTS) | {NAMES[0]: "copy.safetensors"}
TWO_LOOPS = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BEYOND_4_GIB = {"strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None}
POSITIVE = "an integer in [1, "
CASES: dict[str, Case] = {
    # The directory itself.
    "an empty directory": Case({"": Path.mkdir}, ("config.json does not exist",)),
    "a file instead of a directory": Case({"": b"{}"}, ("is no directory", "config.json")),
    "a directory that is a link to nowhere": Case({"": leads_to("nowhere")}, ("is no directory",)),
    # config.json, as a file.
    "config: missing": Case({"config.json": None}, ("config.json does not exist",)),
    "config: a directory": Case({"config.json": Path.mkdir}, ("config.json is a directory",)),
    "config: a pipe": Case({"config.json": os.mkfifo}, ("config.json is a pipe",)),
    "config: a socket": Case({"config.json": a_socket}, ("config.json cannot be read",)),
    "config: a device": Case({"config.json": leads_to("/dev/zero")}, ("config.json is a device",)),
    "config: a link to nowhere": Case(
        {"config.json": leads_to("nowhere")}, ("config.json is a link that leads nowhere",)
    ),
    "config: a link to itself": Case(
        {"config.json": leads_to("config.json")}, ("config.json cannot be read",)
    ),
    "config: empty": Case({"config.json": b""}, ("config.json cannot be read",)),
    "config: not UTF-8": Case({"config.json": b"\xff\xfe{}"}, ("config.json", "UTF-8")),
    "config: no JSON": Case({"config.json": b"{'a': 1}"}, ("config.json cannot be read",)),
    "config: a list": Case({"config.json": b"[1]"}, ("config.json is not a JSON object",)),
    "config: a number": Case({"config.json": b"7"}, ("config.json is not a JSON object",)),
    "config: nested": Case({"config.json": NESTED}, ("config.json", "nested too deeply")),
    "config: nested in a field": Case(
        raw("config.json", "x", "[" * 100_000 + "]" * 100_000), ("config.json", "nested too deeply")
    ),
    "config: megabytes": Case({"config.json": b" " * (2 << 20)}, ("config.json is too long",)),
    "config: a number of 5,000 digits": Case(
        raw("config.json", "hidden_size", "9" * 5000), ("config.json cannot be read",)
    ),
    # config.json, field by field.
    "architectures: none": Case(config(architectures=ABSENT), ("architectures: (none)",)),
    "architectures: a number": Case(config(architectures=5), ("architectures: a list is needed",)),
    "architectures: numbers": Case(config(architectures=[5]), ("architectures: a list of names",)),
    "architectures: unknown": Case(
        config(architectures=["A\nB\x1b[2J"]), ("architectures: 'A\\nB\\x1b[2J' is not supported",)
    ),
    "model_type: a number": Case(config(model_type=5), ("model_type: a string is needed, got 5",)),
    "model_type: unknown": Case(config(model_type="gpt"), ("model_type: llama is needed",)),
    "hidden_size: missing": Case(
        config(hidden_size=ABSENT), (f"hidden_size: {POSITIVE}", "got null")
    ),
    "hidden_size: enormous": Case(config(hidden_size=10**18), (f"hidden_size: {POSITIVE}",)),
    "hidden_size: another": Case(config(hidden_size=256), ("has shape", "config.json asks for")),
    "intermediate_size: null": Case(config(intermediate_size=None), ("intermediate_size: an int",)),
    "num_attention_heads: no divisor": Case(
        config(num_attention_heads=3, num_key_value_heads=3, head_dim=None),
        ("num_attention_heads: a divisor of hidden_size 128 is needed, got 3",),
    ),
    "num_key_value_heads: a fraction": Case(
        config(num_key_value_heads=0.5), ("num_key_value_heads: an integer", "got 0.5")
    ),
    "num_key_value_heads: true": Case(
        config(num_key_value_heads=True), ("num_key_value_heads: an integer", "got true")
    ),
    "num_key_value_heads: a string": Case(
        config(num_key_value_heads="8"), ("num_key_value_heads: an integer", "got '8'")
    ),
    "num_key_value_heads: negative": Case(
        config(num_key_value_heads=-2), ("num_key_value_heads: an integer", "got -2")
    ),
    "num_key_value_heads: 0": Case(
        config(num_key_value_heads=0), ("num_key_value_heads: an integer", "got 0")
    ),
    "num_key_value_heads: no divisor": Case(
        config(num_key_value_heads=3), ("num_key_value_heads: a divisor of the 4 heads",)
    ),
    "num_hidden_layers: 30 million": Case(
        config(num_hidden_layers=30_000_000), ("num_hidden_layers: an integer in [1, 4096]",)
    ),
    "num_hidden_layers: one too many": Case(
        config(num_hidden_layers=3), ("model.layers.2.", "is missing")
    ),
    "head_dim: odd": Case(config(head_dim=33), ("head_dim: an even number is needed, got 33",)),
    "vocab_size: 0": Case(config(vocab_size=0), (f"vocab_size: {POSITIVE}", "got 0")),
    "vocab_size: enormous": Case(config(vocab_size=10**15), (f"vocab_size: {POSITIVE}",)),
    "vocab_size: a list": Case(config(vocab_size=[4096]), ("vocab_size", "got a list")),
    "rms_norm_eps: not a number": Case(
        config(rms_norm_eps=float("nan")), ("rms_norm_eps: a number from 1e-30 on", "got NaN")
    ),
    "rms_norm_eps: infinite": Case(
        raw("config.json", "rms_norm_eps", "1e400"), ("rms_norm_eps: a number", "got Infinity")
    ),
    "rms_norm_eps: none in float32": Case(
        config(rms_norm_eps=1e-300), ("rms_norm_eps: a number from 1e-30 on", "got 1e-300")
    ),
    "rms_norm_eps: a string": Case(config(rms_norm_eps="1e-5"), ("rms_norm_eps: a number",)),
    "max_position_embeddings: 0": Case(
        config(max_position_embeddings=0), ("max_position_embeddings: an integer in [8, ",)
    ),
    "max_position_embeddings: 1e18": Case(
        config(max_position_embeddings=10**18), ("max_position_embeddings: an integer",)
    ),
    "max_position_embeddings: a float": Case(
        config(max_position_embeddings=1e18), ("max_position_embeddings: an integer", "1e+18")
    ),
    "rope_scaling: a string": Case(
        config(rope_scaling="x"), ("rope_scaling: an object is needed",)
    ),
    "rope_parameters: a list": Case(config(rope_parameters=[1]), ("rope_parameters: an object",)),
    "rope_parameters: unknown": Case(
        config(rope_parameters={"rope_type": "yarn"}), ("rope_type: yarn is not supported",)
    ),
    "rope_parameters: a kind that is a list": Case(
        config(rope_parameters={"rope_type": ["linear"]}), ("rope_type: a string is needed",)
    ),
    "rope_parameters: infinite": Case(
        config(rope_parameters={"rope_theta": float("inf")}), ("rope_theta: a number from 1 on",)
    ),
    "rope_theta: next to nothing": Case(
        config(rope_theta=1e-300), ("rope_theta: a number from 1 on", "got 1e-300")
    ),
    "rope_parameters: a factor of next to nothing": Case(
        config(rope_parameters={"rope_type": "linear", "factor": 1e-300}),
        ("factor: a number from 1 on", "got 1e-300"),
    ),
    "rope_parameters: no factor": Case(
        config(rope_parameters={"rope_type": "linear"}), ("factor: a number from 1 on", "got null")
    ),
    "rope_parameters: factors the wrong way round": Case(
        config(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
                "original_max_position_embeddings": 64,
            }
        ),
        ("high_freq_factor: more than low_freq_factor",),
    ),
    "eos_token_id: a string": Case(
        generation(eos_token_id="1"),
        ("generation_config.json: eos_token_id: a token id", "got '1'"),
    ),
    "eos_token_id: odd things": Case(
        generation(eos_token_id=[1, [2]]), ("generation_config.json: eos_token_id", "got a list")
    ),
    "eos_token_id: a fraction": Case(
        config(eos_token_id=1.5), ("config.json: eos_token_id: a token id",)
    ),
    "eos_token_id: negative": Case(config(eos_token_id=-1), ("-1 is not in the vocabulary",)),
    "tie_word_embeddings: yes": Case(
        config(tie_word_embeddings="yes"), ("tie_word_embeddings: true or false", "got 'yes'")
    ),
    "tie_word_embeddings: 1": Case(config(tie_word_embeddings=1), ("tie_word_embeddings: true",)),
    "dtype: int4": Case(
        config(dtype="int4"), ("config.json: dtype: int4 is not supported, only float32, bfloat16",)
    ),
    "torch_dtype: int4": Case(
        config(torch_dtype="int4"), ("torch_dtype: int4 is not supported", "get the model in one")
    ),
    "torch_dtype: a number": Case(
        config(torch_dtype=7), ("torch_dtype: a string is needed, got 7",)
    ),
    "layer_types: a number": Case(config(layer_types=3), ("layer_types: a list is needed",)),
    "hidden_act: a list": Case(config(hidden_act=["silu"]), ("hidden_act: a string is needed",)),
    "attention_bias: a number": Case(config(attention_bias=1), ("attention_bias: true or false",)),
    # generation_config.json.
    "generation: no JSON": Case(
        {"generation_config.json": b"{"}, ("generation_config.json cannot be read",)
    ),
    "generation: a list": Case(
        {"generation_config.json": b"[]"}, ("generation_config.json is not a JSON object",)
    ),
    "generation: nested": Case({"generation_config.json": NESTED}, ("generation_config.json",)),
    "generation: a directory": Case(
        {"generation_config.json": Path.mkdir}, ("generation_config.json is a directory",)
    ),
    "generation: a pipe": Case(
        {"generation_config.json": os.mkfifo}, ("generation_config.json is a pipe",)
    ),
    "generation: a temperature that is a list": Case(
        generation(temperature=[1]), ("temperature: must be a number, got a list",), draft=False
    ),
    "generation: an infinite top_k": Case(
        raw("generation_config.json", "top_k", "1e400"), ("top_k: must be a",), draft=False
    ),
    # The header of the weights.
    "weights: missing": Case({WEIGHTS: None}, (f"neither {WEIGHTS} nor",)),
    "weights: empty": Case({WEIGHTS: b""}, (f"{WEIGHTS} is not a complete safetensors file",)),
    "weights: a directory": Case({WEIGHTS: Path.mkdir}, (f"{WEIGHTS} is a directory",)),
    "weights: a pipe": Case({WEIGHTS: os.mkfifo}, (f"{WEIGHTS} is a pipe",)),
    "weights: a device": Case({WEIGHTS: leads_to("/dev/zero")}, (f"{WEIGHTS} is a device",)),
    "weights: cut short": Case(
        weights(end=1_000_000), (f"{WEIGHTS} is not a complete", "its weights end at")
    ),
    "header: no bytes": Case(weights(length=0), (f"{WEIGHTS} is not a complete",)),
    "header: more bytes than there can be": Case(
        weights(length=2**64 - 1), (f"{WEIGHTS} is not a complete", "its header should have")
    ),
    "header: more bytes than there are": Case(
        weights(length=1 << 30), (f"{WEIGHTS} is not a complete",)
    ),
    "header: a byte less": Case(
        weights(length=len(json.dumps(HEADER)) - 1),
        (f"{WEIGHTS}: the header cannot be read",),
    ),
    "header: not UTF-8": Case(
        weights(b'{"\xff": 1}', end=0), (f"{WEIGHTS} is not a complete", "utf-8")
    ),
    "header: a list": Case(weights(b"[]"), (f"{WEIGHTS}: the header is not a JSON object",)),
    "header: nested": Case(weights(NESTED), (f"{WEIGHTS}: the header", "nested too deeply")),
    "header: empty": Case(weights({}, end=0), ("model.embed_tokens.weight",)),
    "header: metadata of numbers": Case(
        weights({**HEADER, "__metadata__": {"a": 1}}),
        (f"{WEIGHTS}: ", "header"),
    ),
    "weight: a number": Case(
        weights({**HEADER, NORM: 5}), (f"weight {NORM}: dtype, shape and data_offsets",)
    ),
    "weight: nothing said": Case(
        weights({**HEADER, NORM: {}}), (f"weight {NORM} has dtype null, one of F32",)
    ),
    "dtype: a list": Case(
        weight(NORM, dtype=["F32"]), (f"weight {NORM} has dtype a list, one of F32",)
    ),
    "dtype: unknown": Case(
        weight(NORM, dtype="F\n7"), (f"weight {NORM} has dtype 'F\\n7', one of F32",)
    ),
    "dtype: not that of a model": Case(
        weight(NORM, dtype="I16"), (f"{NORM} has dtype I16, one of F32",)
    ),
    "shape: negative": Case(weight(NORM, shape=[-128]), (f"{NORM}: shape: a list of sizes",)),
    "shape: a fraction": Case(weight(NORM, shape=[128.0]), (f"{NORM}: shape: a list of sizes",)),
    "shape: true": Case(weight(NORM, shape=[True]), (f"{NORM}: shape: a list of sizes",)),
    "shape: huge": Case(weight(NORM, shape=[10**30]), (f"{NORM}: shape: a list of sizes",)),
    "shape: a huge product": Case(
        weight(NORM, shape=[1 << 47] * 8), (f"{NORM}: data_offsets:", "are needed, got")
    ),
    "shape: a number": Case(
        weight(NORM, shape=128), (f"{NORM}: shape: a list of sizes", "got 128")
    ),
    "shape: another": Case(
        weight(EMBEDDING, shape=[128, 4096]),
        ("has shape [128, 4096], config.json asks for [4096, 128]",),
    ),
    "offsets: beyond the file": Case(
        weight(NORM, data_offsets=[BEGIN + 10**12, END + 10**12]),
        (f"{NORM}: data_offsets: begin leaves a hole",),
    ),
    "offsets: over each other": Case(
        weight(NORM, data_offsets=[0, END - BEGIN]),
        ("data_offsets: begin overlaps the weight before it",),
    ),
    "offsets: negative": Case(
        weight(NORM, data_offsets=[-1, END]), (f"{NORM}: data_offsets: a list of two",)
    ),
    "offsets: strings": Case(
        weight(NORM, data_offsets=[str(BEGIN), str(END)]),
        (f"{NORM}: data_offsets: a list of two integers",),
    ),
    "offsets: the end first": Case(
        weight(NORM, data_offsets=[END, BEGIN]), (f"{NORM}: data_offsets: a list of two integers",)
    ),
    "offsets: three": Case(
        weight(NORM, data_offsets=[BEGIN, END, END]), (f"{NORM}: data_offsets: a list of two",)
    ),
    "offsets: a byte less": Case(
        weight(NORM, data_offsets=[BEGIN, END - 1]), (f"{NORM}: data_offsets:", "bytes")
    ),
    "offsets: holes": Case(weights(MOVED, before=bytes(8)), ("data_offsets: begin leaves a hole",)),
    "offsets: bytes of nobody": Case(
        weights(after=bytes(8)),
        (f"{WEIGHTS} is not a complete", "its weights end at"),
    ),
    "a weight is missing": Case(
        weights(FEWER, end=HEADER[LAST]["data_offsets"][0]), ("weight ", " is missing")
    ),
    "a weight too many": Case(
        weights({**HEADER, "model.\x1b[2J\nx": SMALL}, after=bytes(8)),
        (f"{WEIGHTS}: weight 'model.\\x1b[2J\\nx' is not part",),
    ),
    # The index of weights in several files.
    "index: nested": Case({INDEX: NESTED}, (f"{INDEX} cannot be read", "nested too deeply")),
    "index: no map": Case({INDEX: b"{}"}, (f"{INDEX}: weight_map: the names of weights",)),
    "index: a map that is a list": Case(index([1]), (f"{INDEX}: weight_map: an object is needed",)),
    "index: a file that is missing": Case(
        index({"a": "b.safetensors"}), (f"{INDEX}: shard b.safetensors is missing",)
    ),
    "index: a way out": Case(
        index({"a": "../../etc/passwd"}), (f"{INDEX}: weight_map: a: the name of a file in this",)
    ),
    "index: an absolute path": Case(
        index({"a": "/etc/passwd"}), (f"{INDEX}: weight_map: a: the name of a file in this",)
    ),
    "index: a number": Case(
        index({"a": 5}), (f"{INDEX}: weight_map: a: the name of a file", "got 5")
    ),
    "index: the directory": Case(index({"a": ".."}), ("the name of a file in this directory",)),
    "index: a name with a zero": Case(index({"a": "x\0y"}), ("shard 'x\\x00y' is missing",)),
    "index: another file": Case(
        index({"a": "config.json"}), ("config.json is not a complete safetensors file",)
    ),
    "index: a weight that is not there": Case(
        index({"a": WEIGHTS}), (f"{INDEX}: a is not in {WEIGHTS}",)
    ),
    "index: weights twice": Case(
        {**index(TWICE), "copy.safetensors": weights()[WEIGHTS]}, ("is in another shard",)
    ),
    "index: a pipe": Case({INDEX: os.mkfifo}, (f"{INDEX} is a pipe",)),
    "index: a shard that is a pipe": Case(
        {"b.safetensors": os.mkfifo, **index({"a": "b.safetensors"})},
        ("b.safetensors is a pipe",),
    ),
    # The tokenizer.
    "tokenizer: missing": Case({"tokenizer.json": None}, ("tokenizer.json does not exist",)),
    "tokenizer: empty": Case({"tokenizer.json": b""}, ("tokenizer.json cannot be read",)),
    "tokenizer: a list": Case({"tokenizer.json": b"[]"}, ("tokenizer.json is not a JSON object",)),
    "tokenizer: nested": Case({"tokenizer.json": NESTED}, ("tokenizer.json", "nested")),
    "tokenizer: a pipe": Case({"tokenizer.json": os.mkfifo}, ("tokenizer.json is a pipe",)),
    "tokenizer: nothing said": Case({"tokenizer.json": b"{}"}, ("tokenizer.json: model: vocab",)),
    "tokenizer: a model that is a list": Case(tokenizer(model=[]), ("model: an object is needed",)),
    "tokenizer: a model of no kind": Case(
        tokenizer(model={**MODEL, "type": "X"}), ("tokenizer.json: the tokenizer cannot be loaded",)
    ),
    "tokenizer: no vocabulary": Case(
        tokenizer(model={**MODEL, "vocab": {}}), ("model: vocab: 1 to",)
    ),
    "tokenizer: ids that are strings": Case(
        tokenizer(model={**MODEL, "vocab": {"a": "0"}}), ("model: vocab: ids that are integers",)
    ),
    "tokenizer: ids below 0": Case(
        tokenizer(model={**MODEL, "vocab": {"a": -5}}), ("model: vocab: ids that are",)
    ),
    "tokenizer: ids that take all memory": Case(
        tokenizer(model={**MODEL, "vocab": {"a": 2**31}}),
        ("model: vocab: ids that are integers in [0, ",),
    ),
    "tokenizer: merges of nothing": Case(
        tokenizer(model={**MODEL, "merges": ["no such"]}),
        ("tokenizer.json: the tokenizer cannot be loaded",),
    ),
    "tokenizer: added tokens that are numbers": Case(
        tokenizer(added_tokens=[1]), ("added_tokens: objects, each with the id of a token",)
    ),
    "tokenizer: an added token without a text": Case(
        tokenizer(added_tokens=[{"id": 3}]), ("added_tokens: token 3 needs a string as content",)
    ),
    "tokenizer: rules of nothing": Case(
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        ("tokenizer.json: the tokenizer cannot be loaded",),
    ),
    "tokenizer: rules that add what is no token": Case(
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"x": {"id": "x", "ids": [999_999], "tokens": ["x"]}},
            }
        ),
        ("tokenizer.json: post_processor: ids of the vocabulary are needed, got 999999",),
    ),
    "tokenizer: a pattern that matches in too many ways": Case(
        tokenizer(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": r"([\s\S]|[\s\S]{2})+[a-c]$"},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        ("tokenizer.json: the tokenizer cannot be loaded",),
    ),
    "tokenizer: padding that takes all memory": Case(
        tokenizer(padding={**BEYOND_4_GIB, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
        ("tokenizer.json: the tokenizer cannot be loaded", "4096 MiB"),
    ),
    "settings: no JSON": Case(
        {"tokenizer_config.json": b"x"}, ("tokenizer_config.json cannot be read",)
    ),
    "settings: nested": Case({"tokenizer_config.json": NESTED}, ("tokenizer_config.json",)),
    "settings: a list": Case(
        {"tokenizer_config.json": b"[]"}, ("tokenizer_config.json is not a JSON object",)
    ),
    "settings: a pipe": Case(
        {"tokenizer_config.json": os.mkfifo}, ("tokenizer_config.json is a pipe",)
    ),
    "settings: a class that is a number": Case(
        settings(tokenizer_class=5), ("tokenizer_class: a string is needed, got 5",)
    ),
    "settings: added tokens without ids": Case(
        settings(added_tokens_decoder={"x": {}}), ("added_tokens_decoder: keys that are integers",)
    ),
    "settings: a token that is a number": Case(
        settings(bos_token=5), ("tokenizer_config.json: bos_token: a string, or an object", "got 5")
    ),
    "special tokens: no JSON": Case(
        {"special_tokens_map.json": b"{"}, ("special_tokens_map.json cannot be read",)
    ),
    "special tokens: a pipe": Case(
        {"special_tokens_map.json": os.mkfifo}, ("special_tokens_map.json is a pipe",)
    ),
    "added tokens: a list": Case(
        {"added_tokens.json": b"[1]"}, ("added_tokens.json is not a JSON object",)
    ),
    "template: a number": Case(
        settings(chat_template=5), ("tokenizer_config.json: chat_template: a string", "got 5")
    ),
    "template: a list of odd things": Case(
        settings(chat_template=[1, {"name": 5}]), ("chat_template: objects, each with the strings",)
    ),
    "template: a directory": Case({TEMPLATE: Path.mkdir}, ("chat_template.jinja is a directory",)),
    "template: a pipe": Case({TEMPLATE: os.mkfifo}, ("chat_template.jinja is a pipe",)),
    "template: a mistake": Case(
        {TEMPLATE: b"{% for message in messages %}"}, ("the chat template is broken",), draft=False
    ),
    "template: nested": Case(
        {TEMPLATE: b"{{ " + b"(" * 50_000}, ("the chat template is broken",), draft=False
    ),
    "template: two loops": Case(
        {TEMPLATE: TWO_LOOPS}, ("it took more than 2 s of processor time",), draft=False
    ),
    "template: a long text": Case(
        {TEMPLATE: b"{{ 'a' * 10**12 }}"}, ("it took more than 1024 MiB of memory",), draft=False
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WHOLE, tmp_path / "model"))


@pytest.fixture
def like_a_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command may set up logging, and must neither start an engine nor take much memory."""

    def start(engine: EngineProcess) -> None:
        raise AssertionError("an engine would be started")

    monkeypatch.setattr(EngineProcess, "start", start)
    root = logging.getLogger()
    hooks, handlers, level = (sys.excepthook, threading.excepthook), root.handlers[:], root.level
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks


def serve(service: str, model: Path, *flags: str) -> int:
    """The exit code of a real command, in this process."""
    arguments = ["serve", str(model), "--listen", "127.0.0.1:0", "--device", "cpu", *flags]
    with pytest.raises(SystemExit) as ended:
        COMMANDS[service](arguments, prog_name=f"ssd-{service}")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def check_refusal(code: int, out: str, err: str, case: Case, folder: Path) -> None:
    lines = err.splitlines()
    assert code == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert lines[0].isprintable()
    assert str(folder) in lines[0]
    for word in case.words:
        assert word in lines[0]
    assert not out


def ways(name: str) -> list[tuple[str, tuple[str, ...]]]:
    """Services that look at it, to serve and to check; outside of the full run one of them."""
    look = [way for way in WAYS if CASES[name].draft or way[0] == "target"]
    return look if FULL else [look[list(CASES).index(name) % len(look)]]


@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.usefixtures("like_a_process")
@pytest.mark.parametrize("name", CASES)
def test_a_broken_model_is_one_line_that_names_it(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    spoil(folder, case.files)
    for service, flags in ways(name):
        code = serve(service, folder, *flags)
        check_refusal(code, *capfd.readouterr(), case, folder)


@pytest.mark.usefixtures("like_a_process")
@pytest.mark.parametrize("service", COMMANDS)
def test_one_that_is_not_broken_would_start(service: str, folder: Path) -> None:
    assert serve(service, folder, "--check-config") == 0
    with pytest.raises(AssertionError, match="an engine would be started"):
        serve(service, folder)


@pytest.mark.usefixtures("like_a_process")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("file", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(
    file: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / file).chmod(0)
    code = serve("target", folder)
    case = Case({}, (f"{file} cannot be read: Permission denied",))
    check_refusal(code, *capfd.readouterr(), case, folder)


ONE = "rope_parameters: a list"


@pytest.mark.parametrize("name", [name if name == ONE else full_only(name) for name in CASES])
def test_it_is_the_same_for_a_process(name: str, folder: Path) -> None:
    spoil(folder, CASES[name].files)
    for service in ("target", "draft")[: 1 + CASES[name].draft]:
        command = [sys.executable, "-m", f"ssd_{service}", "serve", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        check_refusal(done.returncode, done.stdout, done.stderr, CASES[name], folder)
