"""Random JSON schemas whose texts are short."""

import random
from typing import Any

WORDS = ("lamb", "wolf", "moon", "river", "apple", "king")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = [_string, _integer, _choice, _truth, _pattern]
    if depth:
        kinds += [_object, _object, _array, _either]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randint(3, 12)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 400)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 7, None, True], rng.randint(1, 4))}


def _truth(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    patterns = ["^[a-c]{2,5}$", "^(ab|cd){1,4}$", "^x[0-9]{1,4}$"]
    return {"type": "string", "pattern": rng.choice(patterns)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(2)
    most = least + rng.randint(1, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": most,
    }


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
