"""A value that is null asks for nothing: it is as if its field were not there."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import inspect


def without_nulls(given: Any, kind: Any) -> Any:
    """``given`` without fields that are null, as far as ``kind`` says what is in it: schemas,
    messages, and whatever else may hold anything, stay as they are."""
    return _without(given, _described(kind))


@cache
def _described(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _without(given: Any, kind: inspect.Type) -> Any:
    match kind:
        case inspect.UnionType():
            for each in kind.types:
                given = _without(given, each)
        case inspect.StructType() if isinstance(given, dict):
            return _members(given, {field.encode_name: field.type for field in kind.fields})
        case inspect.DictType() if isinstance(given, dict) and not _is_any(kind.value_type):
            return _members(given, {})
        case inspect.ListType() if isinstance(given, list) and not _is_any(kind.item_type):
            return [_without(each, kind.item_type) for each in given]
    return given


def _members(given: Mapping[str, Any], kinds: Mapping[str, inspect.Type]) -> dict[str, Any]:
    anything = inspect.AnyType()
    return {
        name: _without(value, kinds.get(name, anything))
        for name, value in given.items()
        if value is not None
    }


def _is_any(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.AnyType)
