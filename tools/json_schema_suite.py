"""Holds grammars of JSON schemas against the JSON Schema test suite, draft 2020-12.

    python -m tools.json_schema_suite DIRECTORY

DIRECTORY is tests/draft2020-12 of json-schema-org/JSON-Schema-Test-Suite; the sources of the
jsonschema package have it under json/. A schema is refused, or its texts are held to it: no value
that the suite calls invalid may be written. Of valid ones some are never written, though they may
be: properties in another order, 1.0 for 1, formats that the suite takes as notes.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer


def groups(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(directory.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield file.stem, group


def writes(follower: GrammarFollower, tokenizer: Tokenizer, end: int, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), end]
    return follower.num_allowed([], tokens) == len(tokens)


def main() -> int:
    model = resolve_model("stories-target")
    config = load_model_config(model)
    tokenizer = Tokenizer(model, config)
    end = config.eos_token_ids[0]
    compiler = GrammarCompiler(tokenizer.serialized(), config.vocab_size, [end])
    counts: Counter[str] = Counter()
    for name, group in groups(Path(sys.argv[1])):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(group["schema"]))
        try:
            follower = compiler.follow(grammar)
        except InputError:
            counts["of schemas that are refused"] += len(group["tests"])
            continue
        for case in group["tests"]:
            written = writes(follower, tokenizer, end, case["data"])
            counts[
                f"{'valid' if case['valid'] else 'invalid'}, {'written' if written else 'not'}"
            ] += 1
            if written != case["valid"]:
                print(f"{name}: {group['description']}: {case['description']}: {written}")
    for kind, count in sorted(counts.items()):
        print(f"{count:5} {kind}")
    return int(counts["invalid, written"] > 0)


if __name__ == "__main__":
    sys.exit(main())
