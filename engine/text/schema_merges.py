"""How many expressions a text must match at once where the parts of a JSON schema are merged.

The compiler's work doubles with each of them, and cannot be stopped.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

# Of patterns and formats; 13 take a third of a second, each more doubles that.
MAX_TOGETHER = 8
MAX_PLACES = 10_000

# What merges a schema with others, and what stands beside that without saying anything of a value.
MERGING = ("allOf", "anyOf", "oneOf", "$ref")
REMARKS = frozenset(("$defs", "definitions", "$schema", "$id", "title", "description", "default", "examples"))
# Keywords with schemas, one or several, about other values than the one the schema is about.
INSIDE = (
    "items",
    "prefixItems",
    "additionalProperties",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
)

Place = tuple[str, ...]


def check_merges(root: dict[str, Any]) -> None:
    """Raises ValueError if more than MAX_TOGETHER patterns may apply to one text."""
    merges = _Merges(root)
    for schema in _dicts(root):
        if _is_merged(schema) and max(merges.count(schema).values(), default=0) > MAX_TOGETHER:
            raise ValueError(f"more than {MAX_TOGETHER} patterns apply to the same text")


def _is_merged(schema: dict[str, Any]) -> bool:
    """Whether a schema says more than one of its parts does."""
    said = schema.keys() - REMARKS
    return not said.isdisjoint(MERGING) and (len(said) > 1 or len(_list(schema.get("allOf"))) > 1)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a value, itself included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


class _Merges:
    """Counts the expressions of a schema by the place of the text they apply to: a path of property names."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, Counter[Place]] = {}

    def count(self, node: Any) -> Counter[Place]:
        """Those of a schema, with what is merged into it. Raises ValueError if there are too many places."""
        if not isinstance(node, dict):
            return Counter()
        known = self._known.get(id(node))
        if known is not None:
            return known
        found: Counter[Place] = Counter()
        self._known[id(node)] = found  # where a schema contains itself, once is enough
        if number := ("pattern" in node) + ("format" in node):
            found[()] = number
        for key in ("allOf", "anyOf", "oneOf"):
            parts = [self.count(part) for part in _list(node.get(key))]
            merged: Counter[Place] = Counter()
            for part in parts:
                merged = merged + part if key == "allOf" else merged | part
            found.update(merged)
        if isinstance(reference := node.get("$ref"), str):
            found.update(self.count(self._target(reference)))
        for name, part in _inside(node):
            found.update({(name, *place): number for place, number in self.count(part).items()})
        if len(found) > MAX_PLACES:
            raise ValueError("it is made of too many parts with patterns")
        return found

    def _target(self, reference: str) -> Any:
        """What a reference within the schema leads to; None if there is nothing."""
        found: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _inside(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas about values inside the one that `node` is about, by property, all others as one."""
    properties = node.get("properties")
    if isinstance(properties, dict):
        yield from properties.items()
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        yield from (("*", part) for part in patterns.values())
    for key in INSIDE:
        part = node.get(key)
        yield from (("*", item) for item in (part if isinstance(part, list) else [part]))
