"""Closes the objects of a JSON schema: those that list properties have no others.

In JSON Schema an object may have any other property unless the schema forbids them. Small models then invent
properties until their length limit, so servers read a schema that says nothing about others as forbidding
them. `additionalProperties: true`, or a schema there, keeps an object open.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.constraints.schema_cost import target
from engine.constraints.schema_walk import inner_schemas

# What a schema says about the names that it does not list.
OTHERS = ("additionalProperties", "unevaluatedProperties")
ALTERNATIVES = ("anyOf", "oneOf", "dependentSchemas", "if", "then", "else")
# Names collected in one document: those of a schema with all its parts count at each place.
MAX_NAMES = 50_000
# Parts visited in one document; they take about 0.2 s.
MAX_STEPS = 200_000


def close_objects(root: dict[str, Any]) -> None:
    """Add `additionalProperties: false` to a schema, in place, wherever objects list properties.

    A schema made of several parts that list properties (`allOf`, or its own beside an `anyOf`) is closed as a
    whole: it gets the names of all of them, and the parts stay open. It stays open, too, if a part says which
    others it has, or if the document has too many names or parts.
    """
    parts = _Parts(root)
    nodes = [node for _, node in inner_schemas(root)]
    groups = [node for node in nodes if parts.is_group(node)]
    inside = {id(part) for part in parts.inside(*groups)}
    for node in groups:
        if id(node) not in inside:
            parts.close(node)
    inside.update(map(id, groups))
    for node in nodes:
        if isinstance(node.get("properties"), dict) and id(node) not in inside and not _names_others(node):
            node["additionalProperties"] = False


def _names_others(node: dict[str, Any]) -> bool:
    return any(key in node for key in OTHERS)


class _Parts:
    """The parts of schemas: others that apply to the same value."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._names: dict[int, dict[str, None]] = {}
        self._num_names = 0
        self._num_steps = 0

    def is_group(self, node: dict[str, Any]) -> bool:
        """Return True if several parts of a schema that all apply list properties."""
        own = isinstance(node.get("properties"), dict)
        either = any(self._all_names(part) for part in self._alternatives(node))
        return own + either + sum(bool(self._all_names(part)) for part in self._conjuncts(node)) > 1

    def inside(self, *nodes: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts of schemas, and theirs, each once."""
        seen: set[int] = set()
        stack = [part for node in nodes for part in self._parts(node)]
        while stack:
            part = stack.pop()
            self._num_steps += 1
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                stack += self._parts(part)

    def close(self, node: dict[str, Any]) -> None:
        """Close a schema that is made of parts."""
        if self._num_steps > MAX_STEPS:
            return
        is_exact = not any(True for _ in self._alternatives(node))
        for part in self.inside(node):
            if _names_others(part) or "patternProperties" in part:
                return
            is_exact = is_exact and not any(True for _ in self._alternatives(part))
        names = self._all_names(node)
        if "additionalProperties" in node or self._num_names > MAX_NAMES:
            return
        if "unevaluatedProperties" in node:  # it sees the alternative that was chosen, and not the others
            if not is_exact or node["unevaluatedProperties"] is not False:
                return
            del node["unevaluatedProperties"]
        node["properties"] = {**dict.fromkeys(names, True), **node.get("properties", {})}
        node["additionalProperties"] = False

    def _all_names(self, node: dict[str, Any]) -> dict[str, None]:
        """Return the names that a schema and its parts list, in order."""
        known = self._names.get(id(node))
        if known is not None:
            return known
        found: dict[str, None] = {}
        self._names[id(node)] = found  # a schema that contains itself counts once
        if self._num_names <= MAX_NAMES:
            properties = node.get("properties")
            found |= dict.fromkeys(properties if isinstance(properties, dict) else ())
            for part in self._parts(node):
                found |= self._all_names(part)
            self._num_names += len(found)
        return found

    def _parts(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._conjuncts(node)
        yield from self._alternatives(node)

    def _conjuncts(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts that always apply."""
        reference, parts = node.get("$ref"), node.get("allOf")
        if isinstance(reference, str):
            with suppress(ValueError):  # it is refused elsewhere
                parts = [target(self._root, reference), *(parts if isinstance(parts, list) else ())]
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield part

    def _alternatives(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts that may apply."""
        for key in ALTERNATIVES:
            value = node.get(key)
            parts = value if isinstance(value, list) else [value]
            if key == "dependentSchemas" and isinstance(value, dict):
                parts = list(value.values())
            for part in parts:
                if isinstance(part, dict):
                    yield part
