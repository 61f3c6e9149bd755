"""Walks through JSON schemas: their parts, each with its place, and what they refer to."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

# Keywords whose values are schemas, lists of schemas, or schemas by name.
ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
DATA = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
IDENTIFIERS = ("$id", "id", "$anchor", "$dynamicAnchor")


class Part(NamedTuple):
    place: str  # a JSON pointer
    schema: Mapping[str, Any]


def parts(schema: Any) -> Iterator[Part]:
    """All objects inside a schema that may be schemas. One can refer to any place: where one may
    refer to data, that is taken for schemas, too."""
    data_is_named = any(
        f"/{name}" in unquote(ref) for ref in _strings(schema, "$ref") for name in DATA
    )
    skipped = () if data_is_named else DATA
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{place}/{i}", item) for i, item in enumerate(value)]
        if not isinstance(value, Mapping):
            continue
        yield Part(place, value)
        for key, inner in value.items():
            if key in NAMED and isinstance(inner, Mapping):
                waiting += [(f"{place}/{key}/{escaped(n)}", each) for n, each in inner.items()]
            elif key not in skipped:
                waiting.append((f"{place}/{escaped(key)}", inner))


def direct_parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its way there."""
    for key, value in mapping(schema).items():
        if key in ONE:
            yield f"/{key}", value
        elif key in MANY and isinstance(value, list):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(value))
        elif key in NAMED:
            yield from ((f"/{key}/{escaped(name)}", part) for name, part in mapping(value).items())


class References:
    """Finds what references of a schema lead to."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self.identified = [
            part.schema for part in parts(schema) if any(k in part.schema for k in IDENTIFIERS)
        ]
        self._any_identified = {"allOf": self.identified}

    def target(self, reference: str) -> Any:
        """One by name may lead to any part that has a name: all of them stand for it."""
        if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
            return self._any_identified
        found = self._at(unquote(reference[1:]))
        return self._any_identified if found is None else found

    def targets(self) -> list[Any]:
        """All parts that references lead to."""
        found = {id(each): each for each in map(self.target, references(self._root))}
        if found.pop(id(self._any_identified), None) is not None:
            found |= {id(each): each for each in self.identified}
        return list(found.values())

    def _at(self, pointer: str) -> Any:
        value = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value


def references(schema: Any) -> set[str]:
    return set(_strings(schema, "$ref"))


def heights(value: Any) -> dict[int, int]:
    """How many objects and lists lie in each other, for each of them by its ``id``."""
    found: dict[int, int] = {}
    waiting = [value]
    for each in waiting:  # outer ones come before what is in them
        waiting += inner_values(each)
    for each in reversed(waiting):
        if isinstance(each, Mapping | list):
            found[id(each)] = 1 + max((found.get(id(i), 0) for i in inner_values(each)), default=0)
    return found


def inner_values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Texts, numbers, truth values and nulls, each with its place."""
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{place}/{i}", each) for i, each in enumerate(value)]
        elif isinstance(value, Mapping):
            waiting += [(f"{place}/{escaped(name)}", each) for name, each in value.items()]
        else:
            yield place, value


def _strings(value: Any, name: str) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get(name), str):
                yield value[name]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
