"""What a grammar costs: to compile it, to find out what may follow, and the time of a round.

    python -m tools.bench_grammars [--repeats 4] [--expand-to SHAPE] [--draft-expand-to SHAPE]

The shipped pair, as it is or grown, target and draft on different cores. Modes and grammars take
turns, for one stream and for eight. The time of a round is that of a whole answer, divided by its
rounds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ssd.v1 import target_pb2 as pb
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.masks import HeldRow, mask_bytes, write_masks
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tools.bench_kit import Client, Generated, service, setting, story_prompts

Row = dict[str, Any]

STREAMS = (1, 8)
NEW_TOKENS = 128
MODES = ("off", "sync", "ssd")
DEPTH = 7  # of the rounds whose masks are timed
SAMPLED: dict[str, Any] = dict(temperature=0.7, top_p=0.9, top_k=20)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--expand-to", help="of the target, as in ssd-target serve")
    parser.add_argument("--draft-expand-to", help="likewise of the draft")
    args = parser.parse_args()
    print(setting())
    grown = ("--expand-to", args.expand_to) if args.expand_to else ()
    inside = ("--draft-expand-to", args.draft_expand_to) if args.draft_expand_to else ()
    beside = ("--expand-to", args.draft_expand_to) if args.draft_expand_to else ()
    for row in time_masks(resolve_model("stories-target")):
        _print(row)
    with service("ssd_draft", "stories-draft", "--threads", "1", *beside, core=1) as draft:
        linked = ("--draft", draft, "--draft-model", "stories-draft", *inside)
        flags = ("--threads", "1", *grown, *linked)
        with service("ssd_target", "stories-target", *flags, core=0) as target:
            client = Client(target)
            client.wait_for_links(1)
            for streams in STREAMS:
                for row in time_rounds(client, streams, args.repeats):
                    _print(row)


def _print(row: Row) -> None:
    print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def time_masks(directory: Path) -> list[Row]:
    """How long it takes to compile schemas, and to find out what may follow."""
    config = load_model_config(directory)
    tokenizer = Tokenizer(directory, config)
    compiler = GrammarCompiler(tokenizer.serialized(), config.vocab_size, config.eos_token_ids)
    begin = time.perf_counter()
    compiler.follow(Grammar(GrammarKind.REGEX, "a"))
    once = 1e3 * (time.perf_counter() - begin)
    return [
        {"grammar": name, "tokens": config.vocab_size, "tokenizer, once, ms": once}
        | _time_masks(compiler, Grammar(GrammarKind.JSON_SCHEMA, schema), config.vocab_size)
        for name, schema in SCHEMAS.items()
    ]


def _time_masks(compiler: GrammarCompiler, grammar: Grammar, tokens: int) -> Row:
    begin = time.perf_counter()
    followers = [compiler.follow(grammar) for _ in range(max(STREAMS))]
    row: Row = {"compile, ms": 1e3 * (time.perf_counter() - begin) / len(followers)}
    texts = [_text(compiler, grammar, seed) for seed in range(len(followers))]
    places = range(NEW_TOKENS)
    row["a mask, ms"] = _milliseconds(lambda at: followers[0].allowed(texts[0][:at]), places)
    for streams in STREAMS:
        masks = np.zeros((streams * (DEPTH + 1), mask_bytes(tokens)), np.uint8)

        def write(at: int, streams: int = streams, masks: Any = masks) -> None:
            held = [
                HeldRow(i * (DEPTH + 1) + j, followers[i], texts[i][:at], texts[i][at : at + j])
                for i in range(streams)
                for j in range(DEPTH + 1)
            ]
            write_masks(masks, held)

        taken = _milliseconds(write, range(0, NEW_TOKENS - DEPTH, 3))
        row[f"masks of {streams} x {DEPTH + 1} rows, ms"] = taken
    return row


def _text(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> list[int]:
    rng, follower, text = random.Random(seed), compiler.follow(grammar), list[int]()
    while len(text) < NEW_TOKENS:
        allowed = follower.allowed(text)
        if allowed is None:
            raise RuntimeError("a text that the grammar allowed is none")
        text.append(int(rng.choice(np.flatnonzero(np.unpackbits(allowed, bitorder="little")))))
    return text


def _milliseconds(run: Callable[[int], object], places: Sequence[int]) -> float:
    taken = []
    for at in places:
        begin = time.perf_counter()
        run(at)
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.mean(taken)


def time_rounds(client: Client, streams: int, repeats: int) -> list[Row]:
    """Answers with and without a schema, in turns; their texts must be those of ``off``."""
    prompts = story_prompts(streams * 2, seed=41)[:streams]
    done: dict[tuple[str, str], list[list[Generated]]] = {}
    for repeat in range(repeats + 1):
        for mode in MODES:
            for kind in (FREE, *SCHEMAS):
                found = _generate(client, prompts, mode, SCHEMAS.get(kind), seed=repeat)
                if repeat:  # the first time, things are not warm
                    done.setdefault((mode, kind), []).append(found)
    return [_row(done, mode, kind, streams) for mode, kind in done]


def _row(
    done: dict[tuple[str, str], list[list[Generated]]], mode: str, kind: str, streams: int
) -> Row:
    answers = [one for found in done[mode, kind] for one in found]
    plain = [one.tokens for found in done["off", kind] for one in found]
    equal = sum(one.tokens == text for one, text in zip(answers, plain, strict=True))
    row: Row = {
        "grammar": kind,
        "streams": streams,
        "mode": mode,
        "round, ms": _round_ms(done[mode, kind]),
        "tokens/s of a stream": statistics.median(one.rate for one in answers),
        "rounds": sum(one.stats.rounds for one in answers),
        "accepted": sum(one.stats.accepted_tokens for one in answers),
        "hits": sum(one.stats.hits for one in answers),
        "texts equal": f"{equal} of {len(answers)}",
    }
    if kind != FREE:
        row["of none"] = row["round, ms"] / _round_ms(done[mode, FREE])
    return row


def _round_ms(runs: Sequence[Sequence[Generated]]) -> float:
    """The median of runs; in one, streams have the same rounds."""
    return statistics.median(
        1e3 * sum(one.seconds for one in run) / sum(one.stats.rounds for one in run) for run in runs
    )


def _generate(
    client: Client, prompts: Sequence[str], mode: str, schema: str | None, seed: int
) -> list[Generated]:
    grammar = None if schema is None else pb.Grammar(json_schema=schema)

    def one(prompt: str) -> Generated:
        return client.generate(prompt, mode, NEW_TOKENS, seed=seed, grammar=grammar, **SAMPLED)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


if __name__ == "__main__":
    main()
