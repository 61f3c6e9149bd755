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
    required = names[: rng.randint(1, len(names))]
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }
    if rng.random() < 0.4:
        schema |= _further(rng, names, depth)
    if "maxProperties" not in schema and rng.random() < 0.3 and len(required) < len(names):
        schema |= {"minProperties": len(required) + 1}
    return schema


def _further(rng: random.Random, names: list[str], depth: int) -> dict[str, Any]:
    """Names beside those that are listed, all of which are required then: one more at most."""
    more: dict[str, Any] = {"required": names, "maxProperties": len(names) + 1}
    if rng.random() < 0.5:
        more["patternProperties"] = {"^[xyz][0-9]{1,2}$": random_schema(rng, depth - 1), "^la": {}}
    if rng.random() < 0.5:
        more["additionalProperties"] = random_schema(rng, depth - 1)
    elif rng.random() < 0.3:
        more["additionalProperties"] = True
    if rng.random() < 0.4:
        more["minProperties"] = len(names) + rng.randint(0, len(more) > 2)
    return more


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
