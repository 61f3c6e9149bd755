"""Random texts of random schemas: each that ends is JSON that the schema describes."""

import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.speculation.random_schemas import WORDS, random_schema
from tests.suite.scale import share

END = 1
MOST_TOKENS = 150


def test_every_text_that_ends_is_one_of_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    rng, ended, escaped = random.Random(11), 0, 0
    schemas = [{"type": "object", **_opened(rng)} for _ in range(share(1500))]
    schemas += [random_schema(rng) for _ in range(share(1500))]
    writer = Writer(rng, tokenizer)
    for schema in schemas:
        follower = None
        with suppress(InputError):  # some have no text: a name's own schema and a pattern's
            follower = compiler.follow(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        if follower is None:
            continue
        text = writer.write(follower)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            ended += 1
            escaped += "\\" in text
    assert ended > 0.8 * len(schemas)
    assert escaped > 0.02 * len(schemas)


def _opened(rng: random.Random) -> dict[str, Any]:
    """Names that are listed, and any others."""
    names = rng.sample(WORDS, rng.randint(1, 3))
    listed = {name: rng.choice([{"type": "integer"}, {"enum": [1, "a"]}, {}]) for name in names}
    schema: dict[str, Any] = {"properties": listed}
    if rng.random() < 0.5:
        schema["required"] = rng.sample([*names, "x1"], rng.randint(1, len(names)))
    if rng.random() < 0.5:
        schema["patternProperties"] = {"^[xa]": {"type": rng.choice(["integer", "null"])}}
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([{"type": "string"}, {"type": "null"}, True])
    if rng.random() < 0.3 and set(names) <= set(schema.get("required", ())):
        schema["minProperties"] = len(schema["required"]) + rng.randint(0, 1)
    return schema


class Writer:
    """Writes texts that end soon. Names are written with escapes, too."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer) -> None:
        self._rng, self._tokenizer = rng, tokenizer
        self._beginning = {
            begin: np.array([each.startswith(begin) for each in tokenizer.token_bytes])
            for begin in (b"\\", b'"', b"}", b"]", b"")
        }

    def write(self, follower: GrammarFollower) -> str | None:
        """None for one that has not ended."""
        tokens: list[int] = []
        while len(tokens) < MOST_TOKENS:
            tail = self._name()
            tokens += tail[: follower.num_allowed(tokens, tail)]
            allowed = follower.allowed(tokens)
            assert allowed is not None
            assert allowed.any(), follower.problem
            bits = np.unpackbits(allowed, bitorder="little")[: len(self._tokenizer.token_bytes)]
            if bits[END]:
                return self._tokenizer.text_of(tokens)
            wanted = self._beginning[self._rng.choice([b"\\", b'"', b"}", b"]", b"}", b'"', b""])]
            found = np.flatnonzero(bits & wanted)
            tokens.append(int(self._rng.choice(found if len(found) else np.flatnonzero(bits))))
        return None

    def _name(self) -> list[int]:
        if self._rng.random() < 0.8:
            return []
        name = self._rng.choice([*WORDS, "x1"])
        at = self._rng.randrange(len(name))
        escaped = f"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}"
        before = self._rng.choice(['"', '{"', ', "'])
        text = f'{before}{self._rng.choice([name, escaped, escaped])}": '
        return self._tokenizer.encode(text, add_special_tokens=False)
