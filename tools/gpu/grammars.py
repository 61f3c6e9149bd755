"""What a grammar costs where a model has as many tokens as published ones: time of a round, masks.

The shipped pair is given a tokenizer of 128,256 tokens first: masks are as wide as the head.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd.v1 import target_pb2 as pb
from ssd_client.local.mps import DRAFT_SHARE
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.masks import HeldRow, mask_bytes, write_masks
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tools.bench_kit import Client, Generated, story_prompts
from tools.gpu.report import FAILED, Rows
from tools.gpu.serving import (
    MODES,
    PAIRS,
    TIMED,
    Clock,
    Model,
    ModelPair,
    against,
    as_it_comes,
    mps,
)

TOKENS = 128_256
STREAMS = (1, 8)
NEW_TOKENS = 128
REPEATS = 4
MOST = 1.1  # of the time of a round without a grammar
DEPTH = 7  # of the rounds whose masks are timed
SAMPLED: dict[str, Any] = dict(temperature=0.7, top_p=0.9, top_k=20)
SPACE = "\u0120"  # as byte-level vocabularies write it


def _schema(**text: int) -> str:
    """People, whose names and friends are such texts."""
    texts: dict[str, Any] = {"type": "string", **text}
    person = {
        "type": "object",
        "properties": {
            "name": texts,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "friends": {"type": "array", "items": texts, "maxItems": 3},
            "mood": {"enum": ["happy", "sad", "angry", "tired"]},
        },
        "required": ["name", "age", "friends", "mood"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": person, "minItems": 30, "maxItems": 40})


FREE = "none"
SCHEMAS = {"a schema": _schema(), "a schema with bounded texts": _schema(minLength=2, maxLength=40)}


def grammars() -> Rows:
    """The 8B shape and the draft as it ships on one GPU."""
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        _write_whole_head(resolve_model("stories-target"), target)
        _write_whole_head(resolve_model("stories-draft"), draft)
        rows = [row for what, schema in SCHEMAS.items() for row in _masks(target, what, schema)]
        pair = ModelPair(Model(str(target), PAIRS[1][0]), Model(str(draft)))
        with mps(), as_it_comes(pair, *TIMED, draft_share=DRAFT_SHARE) as client:
            for streams in STREAMS:
                rows += _rounds(client, streams)
    return rows


def _write_whole_head(source: Path, folder: Path) -> None:
    """The same model with tokens that it never says."""
    folder.mkdir()
    for file in ("generation_config.json", "tokenizer_config.json"):
        (folder / file).write_bytes((source / file).read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": TOKENS}))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = _more_tokens(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(source / "model.safetensors")
    name = "model.embed_tokens.weight"
    row = weights[name][_unlikeliest(source)]
    more = row.repeat(TOKENS - weights[name].shape[0], 1)
    weights[name] = torch.cat([weights[name], more])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _more_tokens(vocab: dict[str, int]) -> dict[str, int]:
    """Words that are made of the vocabulary's, as long as those of published vocabularies."""
    rng, words = random.Random(0), [word.removeprefix(SPACE) for word in vocab]
    words = [word for word in words if word.isalpha()]
    more = dict(vocab)
    while len(more) < TOKENS:
        length = max(2, round(rng.gauss(7, 2.5)))
        word = "".join(rng.sample(words, 3))[:length]
        more.setdefault(rng.choice(("", SPACE)) + word, len(more))
    return more


def _unlikeliest(source: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(source)(story_prompts(1, seed=2)[0], return_tensors="pt")
    with torch.inference_mode():
        return int(model(**tokens).logits[0].mean(dim=0).argmin())


def _masks(folder: Path, what: str, schema: str) -> Rows:
    """How long it takes to compile the schema, and to find out what may follow."""
    tokenizer = Tokenizer(folder, load_model_config(folder))
    compiler = GrammarCompiler(tokenizer.serialized(), TOKENS, [1])
    grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    begin = time.perf_counter()
    compiler.follow(Grammar(GrammarKind.REGEX, "a"))
    ready = time.perf_counter()
    followers = [compiler.follow(grammar) for _ in range(max(STREAMS))]
    compiled = (time.perf_counter() - ready) / len(followers)
    texts = [_text(compiler, grammar, seed) for seed in range(len(followers))]
    single = _milliseconds(lambda at: followers[0].allowed(texts[0][:at]), range(NEW_TOKENS))
    row: dict[str, Any] = {
        "grammar": what,
        "tokenizer, once, ms": 1e3 * (ready - begin),
        "compile, ms": 1e3 * compiled,
        "a mask, ms": single,
    }
    for streams in STREAMS:
        masks = np.zeros((streams * (DEPTH + 1), mask_bytes(TOKENS)), np.uint8)

        def write(at: int, streams: int = streams, masks: Any = masks) -> None:
            held = [
                HeldRow(i * (DEPTH + 1) + j, followers[i], texts[i][:at], texts[i][at : at + j])
                for i in range(streams)
                for j in range(DEPTH + 1)
            ]
            write_masks(masks, held)

        taken = _milliseconds(write, range(0, NEW_TOKENS - DEPTH, 3))
        row[f"masks of {streams} x {DEPTH + 1} rows, ms"] = taken
    return [row]


def _text(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> list[int]:
    rng, follower, text = random.Random(seed), compiler.follow(grammar), list[int]()
    while len(text) < NEW_TOKENS:
        allowed = follower.allowed(text)
        if allowed is None:
            raise RuntimeError("a text that the grammar allowed is none")
        text.append(int(rng.choice(np.flatnonzero(np.unpackbits(allowed, bitorder="little")))))
    return text


def _milliseconds(run: Any, places: Sequence[int]) -> float:
    taken = []
    for at in places:
        begin = time.perf_counter()
        run(at)
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


def _rounds(client: Client, streams: int) -> Rows:
    """The target's time from one forward to the next, in turns with and without a schema."""
    prompts = story_prompts(streams * 2, seed=41)[:streams]
    took: dict[tuple[str, str], list[float]] = {}
    done: dict[tuple[str, str], list[Generated]] = {}
    for repeat in range(REPEATS + 1):
        for mode in MODES:
            for kind in (FREE, *SCHEMAS):
                before = Clock.read()
                found = _generate(client, prompts, mode, SCHEMAS.get(kind), seed=repeat)
                clock = Clock.read().since(before)
                if repeat:  # the first time, things are not warm
                    took.setdefault((mode, kind), []).append(
                        clock["forward, ms"] + clock["gap, ms"]
                    )
                    done.setdefault((mode, kind), []).extend(found)
    rows: Rows = []
    for (mode, kind), times in took.items():
        texts, plain = done[mode, kind], [one.tokens for one in done["off", kind]]
        taken = statistics.median(times)
        row: dict[str, Any] = {
            "streams": streams,
            "mode": mode,
            "grammar": kind,
            "round, ms": taken,
            "tokens/s of a stream": statistics.median(one.rate for one in texts),
            "hits": sum(one.stats.hits for one in texts),
            "accepted": sum(one.stats.accepted_tokens for one in texts),
            "rounds": sum(one.stats.rounds for one in texts),
            **against(texts, plain),
        }
        if kind != FREE:
            share = row["of none"] = taken / statistics.median(took[mode, FREE])
            if share > MOST:
                row[FAILED] = f"{mode}, {streams}, {kind}: {share:.2f} of a round without"
        rows.append(row)
    return rows


def _generate(
    client: Client, prompts: Sequence[str], mode: str, schema: str | None, seed: int
) -> list[Generated]:
    grammar = None if schema is None else pb.Grammar(json_schema=schema)

    def one(prompt: str) -> Generated:
        return client.generate(prompt, mode, NEW_TOKENS, seed=seed, grammar=grammar, **SAMPLED)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))
