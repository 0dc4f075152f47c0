"""Decides if JSON schemas have no value in common, looking through references."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from engine.constraints.schema_walk import resolved

MAX_DEPTH = 8
# Comparisons of schemas, properties and values in one document; they take about 0.2 s.
MAX_STEPS = 100_000
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
NAMES = {bool: "boolean", str: "string", int: "number", float: "number", type(None): "null"}


class DisjointSchemas:
    """Compares the schemas of one document. Where the answer is not found, they may have a common value."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_steps = 0

    def are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Return True if no value matches two of the schemas."""
        return all(self._excludes(first, second, MAX_DEPTH) for first, second in combinations(schemas, 2))

    def _excludes(self, first: Any, second: Any, depth: int) -> bool:
        """Return True if no value matches both."""
        self._num_steps += 1
        if not depth or self._num_steps > MAX_STEPS:
            return False
        first, second = resolved(self._root, first), resolved(self._root, second)
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict):
            return False
        if self._parts_exclude(first, second, depth) or self._parts_exclude(second, first, depth):
            return True
        own, others = self._values(first), self._values(second)
        if own is not None and others is not None:
            return own.isdisjoint(others)
        common = _types(first, own) & _types(second, others)
        return not common or (common == {"object"} and self._tags_differ(first, second, depth))

    def _parts_exclude(self, schema: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Return True if the alternatives of a schema, or a part of it, exclude another schema."""
        for key in ("anyOf", "oneOf"):
            parts = schema.get(key)
            if isinstance(parts, list) and all(self._excludes(part, other, depth - 1) for part in parts):
                return True
        parts = schema.get("allOf")
        return isinstance(parts, list) and any(self._excludes(part, other, depth - 1) for part in parts)

    def _tags_differ(self, first: dict[str, Any], second: dict[str, Any], depth: int) -> bool:
        """Return True if a property that one of two objects requires has no value that suits both."""
        own, others = first.get("properties"), second.get("properties")
        if not isinstance(own, dict) or not isinstance(others, dict):
            return False
        required = {*_names(first.get("required")), *_names(second.get("required"))}
        self._num_steps += len(own) + len(required)
        shared = [name for name in own if name in others and name in required]
        return any(self._excludes(own[name], others[name], depth - 1) for name in shared)

    def _values(self, schema: dict[str, Any]) -> set[Any] | None:
        """Return the values that a schema lists, each with its type; None if not all are simple ones."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        self._num_steps += len(values)
        if not all(type(value) in NAMES for value in values):
            return None
        return {(NAMES[type(value)], value) for value in values}


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _types(schema: dict[str, Any], values: set[Any] | None) -> set[str]:
    """Return the types that a value of a schema may have; an integer is a number."""
    kinds = schema.get("type", TYPES)
    found = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)}
    if "number" in found:
        found.add("integer")
    if values is not None:
        listed = {kind for kind, _ in values}
        found &= listed | {"integer"} if "number" in listed else listed
    return found
