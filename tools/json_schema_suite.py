"""Holds grammars of JSON schemas against the JSON Schema test suite, draft 2020-12.

    python -m tools.json_schema_suite [DIRECTORY]

DIRECTORY is tests/draft2020-12 of json-schema-org/JSON-Schema-Test-Suite; without one, the suite
that the tests have is taken. A schema is refused, or its texts are held to it: no value that the
suite calls invalid may be written. Of valid ones some are never written, though they may be:
properties in another order, 1.0 for 1, formats that the suite takes as notes.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer

SUITE = Path(__file__).parents[1] / "tests/engine/grammar/json_schema_suite.json.gz"


class Case(NamedTuple):
    name: str  # file, group and test
    valid: bool
    written: bool | None  # None: its schema is refused


def kept_groups() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = json.loads(gzip.decompress(SUITE.read_bytes()))
    return groups


def groups_in(directory: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(directory.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield {"file": file.stem, **group}


def results(
    groups: Iterable[dict[str, Any]], compiler: GrammarCompiler, tokenizer: Tokenizer, end: int
) -> Iterator[Case]:
    for group in groups:
        follower: GrammarFollower | None
        try:
            follower = compiler.follow(
                Grammar(GrammarKind.JSON_SCHEMA, json.dumps(group["schema"]))
            )
        except InputError:
            follower = None
        for case in group["tests"]:
            value = case["data"]
            written = None if follower is None else _writes(follower, tokenizer, end, value)
            name = f"{group['file']}: {group['description']}: {case['description']}"
            yield Case(name, case["valid"], written)


def _writes(follower: GrammarFollower, tokenizer: Tokenizer, end: int, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), end]
    return follower.num_allowed([], tokens) == len(tokens)


def main() -> int:
    model = resolve_model("stories-target")
    config = load_model_config(model)
    tokenizer = Tokenizer(model, config)
    end = config.eos_token_ids[0]
    compiler = GrammarCompiler(tokenizer.serialized(), config.vocab_size, [end])
    groups = groups_in(Path(sys.argv[1])) if len(sys.argv) > 1 else kept_groups()
    counts: Counter[str] = Counter()
    for name, valid, written in results(groups, compiler, tokenizer, end):
        if written is None:
            counts["of schemas that are refused"] += 1
            continue
        counts[f"{'valid' if valid else 'invalid'}, {'written' if written else 'not'}"] += 1
        if written != valid:
            print(f"{name}: {written}")
    for kind, count in sorted(counts.items()):
        print(f"{count:5} {kind}")
    return int(counts["invalid, written"] > 0)


if __name__ == "__main__":
    sys.exit(main())
